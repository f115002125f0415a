"""Time what a study does after its pool is sampled, for several numbers of questions.

    python scripts/benchmarks/speed.py questions --folder FOLDER --questions 500 2000 6000

The pools are synthetic. They have 8 completions per question, 0/1 rewards, normal random numbers in
place of scores, and sketches of the default size. With such a pool the command `mse` neither
samples nor scores, so its CPU seconds are spent on reading, statistics, files, figures and the
page. Imports are not counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot  # noqa: F401
import numpy as np
import transformers  # noqa: F401

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.estimators.moments import centred
from grpo_ustat.mse.__main__ import main
from grpo_ustat.mse.pool_parts import Part
from grpo_ustat.mse.pool_store import PoolStore, draws_of
from grpo_ustat.mse.study import _prompts

COMPLETIONS, FEATURES, GRADIENT = 8, 509, 16381
LOSSES = (
    "dapo", "dr_grpo", "grpo", "gspo", "trl_bnpo", "trl_dapo", "trl_dr_grpo", "trl_grpo",
    "verl_token_mean", "verl_seq_mean_token_mean",
)  # fmt: skip


def overrides(options: argparse.Namespace, questions: int, name: str) -> list[str]:
    """Return overrides for a study with `program` questions that uses the pool written for it."""
    return [
        f"study.questions={questions}", f"dataset.study_size={questions}",
        "dataset.max_term=999", "dataset.max_factor=9999",
        f"budget.pool_completions={COMPLETIONS}", f"budget.feature_sketch={FEATURES}",
        f"budget.gradient_sketch={GRADIENT}", f"group_sizes={[2, 4, 8]}", "study.rollouts=64",
        "launch.workers=1", "launch.num_threads=1", "on_existing=overwrite",
        f"pool={options.folder / f'pool_{questions}'}", f"output_root={options.folder / name}",
        f"objectives=[{','.join(LOSSES[: options.losses])}]",
    ]  # fmt: skip


def write_pool(options: argparse.Namespace, questions: int) -> None:
    """Write the pool parts of all questions in the store's format."""
    config = compose_config("mse", overrides(options, questions, "none"))
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for the folder and for the sizes of the study."""
    parser.add_argument(
        "--folder", type=Path, required=True, help="folder of the pools and the runs"
    )
    parser.add_argument("--questions", type=int, nargs="+", default=[500, 2000, 6000])
    parser.add_argument(
        "--losses", type=int, default=0, help="number of losses besides Algorithm 1's, 0 to 10"
    )
    parser.set_defaults(turns=1)


def programs(options: argparse.Namespace) -> list[str]:
    """Return the numbers of questions, each of which is a program."""
    return list(map(str, options.questions))


def prepare(options: argparse.Namespace, program: str) -> Callable[[], dict[str, float]]:
    """Write the pool unless it exists; a run is a study."""
    options.folder = options.folder.resolve()
    questions = int(program)
    write_pool(options, questions)
    sys.argv[1:] = overrides(options, questions, f"run_{questions}")

    def run() -> dict[str, float]:
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
        return {"losses": options.losses + 1}

    return run
