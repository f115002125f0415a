"""Memory and seconds of what follows the pool of a study, by the number of its questions.

    python scripts/benchmarks/many_questions.py --folder FOLDER --questions 500 2000 6000
    python scripts/benchmarks/many_questions.py --folder FOLDER --trees OLD . --rounds 3

The pools are written, not sampled: 8 completions of each question, 0/1 rewards and normal numbers
in place of scores, with sketches of the default size. On such a pool the command `mse` samples and
scores nothing; its CPU seconds are those of reading, statistics, files, figures and page. Each run
is a process of its own on one thread; of its peak memory the part is counted that its imports do
not take. Trees, versions of the package, take turns; of rounds the median is printed.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path
from statistics import median

import numpy as np

COMPLETIONS, FEATURES, GRADIENT = 8, 509, 16381
LOSSES = (
    "dapo", "dr_grpo", "grpo", "gspo", "trl_bnpo", "trl_dapo", "trl_dr_grpo", "trl_grpo",
    "verl_token_mean", "verl_seq_mean_token_mean",
)  # fmt: skip


def overrides(asked, questions, name):
    """The study of so many questions on the pool written for it."""
    return [
        f"study.questions={questions}", f"dataset.study_size={questions}",
        "dataset.max_term=999", "dataset.max_factor=9999",
        f"budget.pool_completions={COMPLETIONS}", f"budget.feature_sketch={FEATURES}",
        f"budget.gradient_sketch={GRADIENT}", f"group_sizes={[2, 4, 8]}", "study.rollouts=64",
        "launch.workers=1", "launch.num_threads=1", "on_existing=overwrite",
        f"pool={asked.folder / f'pool_{questions}'}", f"output_root={asked.folder / name}",
        f"objectives=[{','.join(LOSSES[: asked.losses])}]",
    ]  # fmt: skip


def write_pool(asked, questions):
    """Parts of every question in the store's format."""
    from grpo_ustat.cli.compose import compose_config
    from grpo_ustat.estimators.moments import centred
    from grpo_ustat.mse.pool_parts import Part
    from grpo_ustat.mse.pool_store import PoolStore, draws_of
    from grpo_ustat.mse.study import _prompts

    config = compose_config("mse", overrides(asked, questions, "none"))
    store = PoolStore(Path(config.pool), draws_of(config))
    store.open()
    if any(store.folder.glob("*.safetensors")):
        return
    rng, lengths = np.random.default_rng(0), np.arange(1, 9)
    signal_R = rng.normal(size=GRADIENT).astype(np.float32) / GRADIENT**0.5
    for prompt in _prompts(config)[0]:
        z_N = (rng.random(COMPLETIONS) < rng.beta(1, 2)).astype(float)
        length_N = rng.choice(lengths, COMPLETIONS)
        scores_NR = rng.normal(size=(COMPLETIONS, FEATURES)) * length_N[:, None] ** 0.5
        wide_NR = rng.normal(size=(COMPLETIONS, GRADIENT)) * length_N[:, None] ** 0.5
        wide_NR = wide_NR.astype(np.float32) + z_N[:, None].astype(np.float32) * signal_R
        cost = [COMPLETIONS, length_N.sum(), 0, 0, 0, 0.01, 0.02]
        store.write(
            prompt,
            0,
            Part(
                rewards_N=z_N, lengths_N=length_N, ended_N=length_N < 8,
                tokens_NT=rng.integers(1, 10, (COMPLETIONS, 8), dtype=np.int32),
                cost=np.array(cost, dtype=float), gram_NN=scores_NR @ scores_NR.T,
                features_NR=scores_NR.astype(np.float32),
                centred_sum_R=centred(z_N).astype(np.float32) @ wide_NR,
                score_sum_R=wide_NR.sum(axis=0),
            ),
        )  # fmt: skip


def run_study(words):
    """One study in this process; prints bytes beyond the imports', and CPU seconds."""
    import matplotlib.pyplot  # noqa: F401
    import transformers  # noqa: F401

    from grpo_ustat.mse import study  # noqa: F401
    from grpo_ustat.mse.__main__ import main

    before, sys.argv[1:] = resource.getrusage(resource.RUSAGE_SELF), words
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"measured {(after.ru_maxrss - before.ru_maxrss) * 1024} {seconds}")


def measured(asked, tree, questions):
    """(bytes, CPU seconds) of a study in a process of its own, of the package in `tree`."""
    words = overrides(asked, questions, f"run_{questions}")
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--run", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
    line = next(x for x in done.stdout.splitlines() if x.startswith("measured "))
    return tuple(map(float, line.split()[1:]))


def main():
    if sys.argv[1:2] == ["--run"]:
        run_study(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="of the pools and the runs")
    parser.add_argument("--questions", type=int, nargs="+", default=[500, 2000, 6000])
    parser.add_argument("--losses", type=int, default=0, help=f"beside Algorithm 1's, 0 to {10}")
    parser.add_argument("--trees", type=Path, nargs="+", default=[Path()], help="of the package")
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    asked.folder = asked.folder.resolve()
    print(f"{'tree':>20}{'questions':>10}{'losses':>8}{'GB':>8}{'MB each':>9}{'CPU s':>9}")
    for questions in asked.questions:
        write_pool(asked, questions)
        found = {tree: [] for tree in asked.trees}
        for _ in range(asked.rounds):
            for tree in asked.trees:
                found[tree].append(measured(asked, tree.resolve(), questions))
        for tree, rows in found.items():
            size, seconds = (median(x) for x in zip(*rows, strict=True))
            print(
                f"{tree.resolve().name:>20}{questions:10}{asked.losses + 1:8}{size / 1e9:8.2f}"
                f"{size / 1e6 / questions:9.3f}{seconds:9.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
