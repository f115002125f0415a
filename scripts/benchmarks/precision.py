"""Measure how a study changes if scores use TF32 products (emulated on a CPU) or bfloat16.

    python scripts/benchmarks/precision.py model=tiny study.questions=100
    python scripts/benchmarks/precision.py model=FOLDER dataset=gsm8k max_completion_length=48

The arguments are overrides of `mse`. The completions are sampled in float32. The same completions
are then scored in four ways: in float32, with TF32 products, with TF32 also in the T x T products
of float32 factors (`everywhere`; `mse` never does this), and in bfloat16. The script prints the
following differences from float32: the median and the largest relative error of squared score
norms; the relative error of their sum; and the mean and the largest error of inner products of two
scores, relative to the product of the norms. It also prints A_0, A_V and G*.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from grpo_ustat.cli.compose import compose_config
from grpo_ustat.estimators.closed_form import closed_form
from grpo_ustat.mse import pool as pools
from grpo_ustat.mse.result import closed_form_request
from grpo_ustat.mse.study import _prompts
from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.precision import set_tf32
from grpo_ustat.policy.scores import accumulate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/helpers"))
from emulated_tf32 import EmulatedTF32  # noqa: E402

WAYS = ("float32", "TF32", "everywhere", "bfloat16")
SCORE_PART, FULL = pools.score_part, accumulate.full_products


def measure(config, prompts, way):
    """Score the completions in one way; return the pool and its closed forms."""

    def score_part(policy, *arguments):
        if way == "bfloat16":
            return SCORE_PART(narrow, *arguments)
        set_tf32(way != "float32")
        try:
            with EmulatedTF32():
                return SCORE_PART(policy, *arguments)
        finally:
            set_tf32(False)

    narrow = load_policy(config.model.model_name_or_path, dtype="bfloat16")
    pools.score_part = score_part
    accumulate.full_products = nullcontext if way == "everywhere" else FULL
    with tempfile.TemporaryDirectory() as folder:
        pool, _ = pools.build_pool(config, prompts, Path(folder))
    facts = pools.ModelFacts(1, 1.0)
    request = closed_form_request(config, pool, facts)
    return pool, closed_form(pool, request)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("override", nargs="*", help="overrides for `mse`, key=value")
    chosen = ["launch.workers=1", "model.attn_implementation=eager", *parser.parse_args().override]
    config = compose_config("mse", chosen)
    prompts, _ = _prompts(config)
    exact = None
    for way in WAYS:
        pool, statistics = measure(config, prompts, way)
        answers = "  ".join(
            f"{name} {statistics[name].estimate:.4g} [{statistics[name].low:.4g}, "
            f"{statistics[name].high:.4g}]"
            for name in ("a0", "a_v", "gstar")
        )
        q = np.diagonal(pool.gram_PNN, axis1=1, axis2=2)
        off = ~np.eye(q.shape[1], dtype=bool)
        if exact is None:
            exact, norms = pool, q
            scale = np.sqrt(q[:, :, None] * q[:, None, :])
            mean = (pool.gram_PNN / scale)[:, off].mean()
            print(
                f"{q.size} completions of {pool.lengths_PN.mean():.0f} tokens, products {mean:+.4f}"
            )
        assert (pool.lengths_PN == exact.lengths_PN).all()
        each, pairs = np.abs(q / norms - 1), ((pool.gram_PNN - exact.gram_PNN) / scale)[:, off]
        print(
            f"{way}: q median {np.median(each):.1e}, largest {each.max():.1e}, sum "
            f"{q.sum() / norms.sum() - 1:+.1e}; products mean {pairs.mean():+.1e}, largest "
            f"{np.abs(pairs).max():.1e}; {answers}",
            flush=True,
        )


if __name__ == "__main__":
    main()
