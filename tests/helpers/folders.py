"""Run folders as runs leave them, written by hand."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Union, get_args, get_origin

import yaml

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.loss_efficiencies import LossEfficiency
from grpo_ustat.measurements.registry import MEASUREMENTS
from grpo_ustat.pages.tables import csv_text
from grpo_ustat.runs.contents import ENDS, hints_of, is_interval, record_of
from grpo_ustat.runs.record import RunRecord
from grpo_ustat.runs.result import StudyResult, TheoremResult, TrainResult

DONE = ({"event": "start", "host": "h", "pid": 1}, {"event": "end", "outcome": "done"})
KILLED = DONE[:1]
HALF = 0.1  # of every interval
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 72 72">
<g><path d="M 0 0 L 9 9" style="stroke: #332288"/><text x="3" y="3">TEXT</text></g></svg>"""


def pictures(page):
    """The texts of the SVG images of a page."""
    return [
        base64.b64decode(text).decode()
        for text in re.findall('"data:image/svg[+]xml;base64,([^"]*)"', page)
    ]


def completed(record, content=None):
    """A file's content with what it lacks of a record, as little of it as there may be; that of a
    study may hold measurements too.
    """
    content = content or {}
    beside = {one.name: one.record for one in MEASUREMENTS} if record is StudyResult else {}
    keys = keys_of(record)
    if record is StudyResult:
        vary = "equal_rewards" not in content
        keys = keys | {one.name: (one.record, one.always and vary) for one in MEASUREMENTS}
    found = {
        key: with_entries(kind, content[key]) if key in content else least(kind)
        for key, (kind, required) in keys.items()
        if required or key in content
    }
    others = {key: value for key, value in content.items() if key not in found}
    return found | {key: with_entries(beside.get(key), value) for key, value in others.items()}


def unsaved_study(result, config=None, folder="runs/a"):
    """A study of a result, completed, that no file holds."""
    run = RunRecord(Path(folder), "study", result=completed(StudyResult, result))
    if config is not None:
        run.config = config
    return Study(run)


def with_entries(kind, value):
    if isinstance(value, list):
        return [with_entries(kind, entry) for entry in value]
    record = record_in(kind)
    return completed(record, value) if record and isinstance(value, dict) else value


def record_in(kind):
    """The record that a field's type is about, as in `list[RECORD] | None`; None without."""
    if is_dataclass(kind):
        return kind if isinstance(kind, type) else None
    return next((x for x in map(record_in, get_args(kind)) if x), None)


def least(kind):
    """The least that a key may hold."""
    if is_dataclass(kind):
        return completed(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if NoneType in arguments else least(arguments[0])
    return {list: [], str: "", float: 1.0, bool: False, int: 1}.get(origin or kind, {})


def keys_of(record):
    """The keys of a record in a file, with their types, and whether they must be there."""
    needed = {
        field.name: field.default is MISSING and field.default_factory is MISSING
        for field in fields(record)
    }
    found = {}
    for name, kind in hints_of(record).items():
        if name == "measured" and kind is not float:
            continue
        ends, kind = (ENDS, float | None) if is_interval(kind) else (("",), kind)
        found |= {f"{name}{end}": (kind, needed[name]) for end in ends}
    return found


@cache
def composed_once(entry, *overrides):
    return json.dumps(asdict(compose_config(entry, list(overrides))))


def configured(entry, changes, *overrides):
    """A configuration with other values, by dotted key."""
    config = json.loads(composed_once(entry, *overrides))
    for key, value in changes.items():
        *path, last = key.split(".")
        part = config
        for name in path:
            part = part[name]
        part[last] = value
    return config


def eval_row(step, mean, n=40):
    row = {"step": step, "split": "test", "decoding": "sampled", "quantity": "accuracy"}
    row |= {"mean_reward": mean, "low": mean - HALF, "high": mean + HALF}
    row |= {"n": n, "num_generations": 1}
    return row | {"clipped_ratio": 0.0, "extraction_failure_ratio": 0.0}


def metrics_row(step, reward):
    row = {"step": step, "reward": reward, "frac_reward_zero_std": 0.25}
    return row | {"completions/mean_length": 20.0 + step, "completions/clipped_ratio": 0.0}


def trained(folder, size, seed, accuracies, *, rollouts=32, done=True, changes=(), commit="a" * 40):
    """A training run that was evaluated at some steps, `{step: accuracy}`; unless `done` killed."""
    keys = {"group_size": size, "budget.rollouts": rollouts, "seed": seed, "max_steps": 8}
    config = configured("train", keys | dict(changes))
    evals = [eval_row(step, accuracy) for step, accuracy in accuracies.items()]
    begin(folder, config, DONE if done else KILLED, commit)
    (folder / "eval.csv").write_text(csv_text(evals))
    rows = [metrics_row(s, 0.1 * seed + 0.01 * s) for s in range(1, max(accuracies) + 1)]
    lines = [json.dumps(row) for row in rows]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    last = evals[-1]
    result = {"quantity": last["quantity"], "final_mean_reward": last["mean_reward"]}
    result |= {"mean_reward_low": last["low"], "mean_reward_high": last["high"], "evals": evals}
    result |= {"steps": 8, "seconds": 1.0, "rollouts": 8 * rollouts, "tokens": 1000}
    if done:
        (folder / "result.json").write_text(json.dumps(completed(TrainResult, result)))
    return folder


def studied(folder, model, errors, *, changes=(), losses=(), off_policy=None):
    """A finished study, `{(baseline, G): mse}`, and rows on its losses' efficiency, of rollouts of
    its own and of another policy.
    """
    config = configured("mse", {"model.name": model} | dict(changes))
    begin(folder, config, DONE)
    kind = {"method": "closed_form", "target": "gradient of the expected reward"}
    kind |= {"setting": "all_questions_once", "num_prompts": 8, "interval": "completions"}
    curves = [
        kind | {"baseline": name, "group_size": size, "unbiased": True}
        | {"mse": x, "low": x / 2, "high": 2 * x, "replicates": None}
        for (name, size), x in errors.items()
    ]  # fmt: skip
    scaling = {
        f"{x}{end}": 4.0 for x in ("c1", "c2", "c3", "gstar") for end in ("", "_low", "_high")
    }
    # 1 + sqrt(C3/C1)
    scaling |= dict.fromkeys(("gstar", "gstar_low", "gstar_high"), 2.0)
    scaling |= {"covariance": [[0.0] * 3] * 3, "dof": 99.0, "prompts": 100.0}
    scaling["curve"] = [
        {"group_size": g, "n_mse": g + 4 / g, "low": g, "high": 2.0 * g} for g in (2, 4)
    ]
    assumption = {
        f"{x}{end}": 0.5 for x in ("corr", "av_minus_a0") for end in ("", "_low", "_high")
    }
    policy = {"name": model, "quantity": "accuracy", "mean_reward": 0.5}
    policy |= {"mean_reward_low": 0.4, "mean_reward_high": 0.6}
    result = {"curves": curves, "scaling": scaling, "assumption2": assumption, "policy": policy}
    result |= {"questions": 8, "pool_completions": 16, "summary": ""}
    result["noise"] = {"curve": [{"group_size": 8}], "best": {"group_size": None}}
    result["cost"] = {"rollouts": 128, "tokens": 900, "seconds_generate": 1, "seconds_score": 1}
    if losses:
        result["losses"] = [*losses]
    if off_policy:
        result["off_policy"] = off_policy
    (folder / "result.json").write_text(json.dumps(completed(StudyResult, result)))
    return folder


def loss_row(
    loss, size, efficiency_same_g=(0.9, 0.8, 1.0), direction=(0.81, 0.64, 0.9025), **changes
):
    """The row of a loss: half its efficiency at the same G is that at the best G."""
    half = [None if x is None else x / 2 for x in efficiency_same_g]
    row = {"loss": loss, "baseline": "group_std", "loss_type": "dapo", "rollouts": 256}
    row |= {
        "group_size": size,
        "unbiased_direction": False,
        "best": size == 8,
        "may_be_best": size == 8,
    }
    numbers = {
        "efficiency_same_g": efficiency_same_g,
        "efficiency_best_g": half,
        "direction": direction,
        "noise": (0.8, 0.7, 0.9),
    }
    for name, values in numbers.items():
        row |= dict(zip((name, f"{name}_low", f"{name}_high"), values, strict=True))
    return row | changes


def refused_loss(loss, size, reason):
    """The row of a loss that is not measured at G."""
    whole = loss_row(loss, size, best=False, may_be_best=False, reason=reason)
    return {
        key: value for key, value in whole.items()
        if not key.startswith(("efficiency", "direction", "noise"))
    }  # fmt: skip


def efficiencies(*rows):
    """Rows such as those of `loss_row` as they are read back."""
    return record_of(list[LossEfficiency], list(rows))


def study_of(folder, **result):
    """A finished study of a folder that need not be there."""
    return Study(RunRecord(folder, result=completed(StudyResult, result)))


def claim(verdict, what="slope of the error", **changes):
    """One that was estimated."""
    of = {"what": what, "predicted": -1.0, "measured": -0.75, "low": -0.9, "high": -0.6}
    return of | {"verdict": verdict, "how": "95 % over 100 replicates"} | changes


def proved(folder, theorem, *claims, problem="coins", seed=0, done=True, answer="It was found."):
    """A run of a theorem, see `claim`; unless `done` killed."""
    words = f"theorem={theorem}", f"theorem.problem={problem}"
    begin(folder, configured("gap", {"seed": seed}, *words), DONE if done else KILLED)
    if not done:
        return folder
    verdicts = [one["verdict"] for one in claims]
    worst = next((v for v in ("disagrees", "not decided") if v in verdicts), "agrees")
    result = {
        "theorem": theorem,
        "statement": "The paper says so.",
        "problem": {"prompts": 4, "mu": 0.5},
    }
    result |= {"claims": list(claims), "answer": answer, "verdict": worst}
    result |= {"cost": {"rollouts": 3000, "seconds": 7.5}, "summary": f"{theorem}: {answer}"}
    result |= {"versions": {"grpo-ustat": "1"}}
    (folder / "result.json").write_text(json.dumps(completed(TheoremResult, result)))
    (folder / "figure.svg").write_text(SVG.replace("TEXT", f"drawn by {theorem} on {problem}"))
    return folder


def begin(folder, config, launches, commit="a" * 40):
    """What identifies a run."""
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "code.json").write_text(json.dumps({"commit": commit, "weights": "w", "data": None}))
    (folder / "launches.jsonl").write_text("".join(json.dumps(row) + "\n" for row in launches))
