"""Training runs and a study beside each other, written by hand."""

from __future__ import annotations

import json

from folders import studied, trained

from grpo_ustat.report.best_group_size import best_group_size
from grpo_ustat.report.collect import entries_in, read_runs

POLICY = {"model.name": "tiny_base", "model.model_name_or_path": "embedded:tiny_base"}
GAIN = 0.1  # of the last evaluation over the one before
ALIKE = [0.50, 0.52, 0.54, 0.56]  # accuracies at the end, a seed each
WORSE = [0.30, 0.36, 0.34, 0.40]  # by 0.18, two seeds by 0.20, two by 0.16
CLOSE = [0.44, 0.54, 0.48, 0.58]  # by 0.02, two seeds by 0.06, two by -0.02


def sweep(place, accuracies, *, rollouts=32, changes=(), done=True):
    """Runs of one n, `{G: [accuracy at the end, of each seed]}`; 40 test questions."""
    for size, found in accuracies.items():
        for seed, accuracy in enumerate(found):
            evals = {0: 0.1, 4: accuracy - GAIN, 8: accuracy}
            folder = place / f"G-{size}-n-{rollouts}" / f"seed-{seed}"
            keys = {"rollouts": rollouts, "changes": POLICY | dict(changes), "done": done}
            trained(folder, size, seed, evals, **keys)
    return [str(place)]


def study(place, c1=1.0, c2=10.0, c3=49.0, ends=(7.5, 8.5), changes=()):
    """A study with G* = 1 + sqrt(c3/c1), 8 unless told otherwise; `ends` None: without G*."""
    errors = {("leave_one_out", 2): 1.0}
    folder = studied(place, "tiny_base", errors, changes=POLICY | dict(changes))
    result = json.loads((folder / "result.json").read_text())
    gstar = None if ends is None else 1 + (c3 / c1) ** 0.5
    low, high = ends or (None, None)
    result["scaling"] |= {"c1": c1, "c2": c2, "c3": c3}
    result["scaling"] |= {"gstar": gstar, "gstar_low": low, "gstar_high": high}
    (folder / "result.json").write_text(json.dumps(result))
    return [str(place)]


def compare(trained, measured):
    """`best_group_size` of all runs in these folders."""
    of_training, of_studies = (read_runs(entries_in(places)).runs for places in (trained, measured))
    training = [run for run in of_training if run.command == "train"]
    return best_group_size(training, [run for run in of_studies if run.command == "mse"])
