"""Time exact scores and an ordinary forward and backward pass over the same batch.

    python scripts/benchmarks/speed.py scores FOLDER --rows 8 --prompt 40 --completion 88
    python scripts/benchmarks/speed.py scores FOLDER --rows 32 --completion 256 --spread 0.6 \\
        --programs study passes layers passes-layers

The programs are `ordinary` (log-probabilities of the completions, and a backward pass to all
parameters), `scores` (squared norms and one pooled gradient), `gram` (with the Gram matrix),
`study` (with the Gram matrix, 2 pooled gradients and the sketches that a study stores) and `layers`
(like `study`, but each layer is computed twice). The programs `passes` and `passes-layers` are like
`study` and `layers`, but each pass contains completions of similar length, as in studies. With
`--spread`, the lengths are lognormal with this sigma, and the longest completion has `--completion`
tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from grpo_ustat.policy.loading import load_policy
from grpo_ustat.policy.logprobs import Rows, completion_logprobs
from grpo_ustat.policy.scores.backward import completion_scores, parameter_sizes
from grpo_ustat.policy.scores.rollouts import pass_sizes, tokens_of_overhead
from grpo_ustat.policy.scores.sketch import Sketch

PROGRAMS = ("ordinary", "scores", "gram", "study", "layers", "passes", "passes-layers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add options for the model, the shape of the batch and the programs."""
    parser.add_argument("model", help="embedded:NAME, or a model's folder")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=40, help="tokens")
    parser.add_argument("--completion", type=int, default=88, help="tokens")
    parser.add_argument("--spread", type=float, default=0.0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--programs", nargs="+", default=PROGRAMS[:5], choices=PROGRAMS)
    parser.set_defaults(warm=1, turns=5)


def programs(options: argparse.Namespace) -> list[str]:
    """Return the chosen programs."""
    return list(options.programs)


def batch(options: argparse.Namespace, vocabulary: int) -> list[torch.Tensor]:
    """Draw tokens, attention masks and completion masks of rows that share a prompt."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.rows, options.prompt + options.completion)
    ids = torch.randint(0, vocabulary, shape, generator=generator)
    ids[:, : options.prompt] = ids[0, : options.prompt]
    lengths = (options.spread * torch.randn(options.rows, generator=generator)).exp().sort()[0]
    lengths = (options.completion * lengths / lengths[-1]).ceil()
    columns = torch.arange(shape[1]) - options.prompt
    attention = (columns < lengths[:, None]).long()
    completion = attention * (columns >= 0)
    return [x.to(options.device) for x in (ids, attention, completion)]


def prepare(options: argparse.Namespace, program: str) -> Callable[[], object]:
    """Load the model; a run processes a batch."""
    torch.set_num_threads(options.threads)
    model = load_policy(options.model, dtype=options.dtype).model.to(options.device)
    rows = batch(options, model.config.vocab_size)
    weights = torch.linspace(-1, 1, options.rows, device=options.device)
    if program == "ordinary":

        def backward() -> None:
            model.zero_grad(set_to_none=True)
            packed = Rows(*rows, width=options.completion)
            (completion_logprobs(model, packed) * weights).sum().backward()

        return backward
    arguments: dict[str, object] = {"weights_KB": weights[None], "gram": program == "gram"}
    if program not in ("scores", "gram"):
        sizes = parameter_sizes(model)
        arguments = {
            "weights_KB": torch.stack([weights, torch.ones_like(weights)]), "gram": True,
            "features": Sketch(sizes, 1021), "pooled": Sketch(sizes, 32749),
            "by_layer": "layers" in program,
        }  # fmt: skip
    if "passes" in program:
        lengths = rows[1].sum(dim=1).cpu().numpy()
        arguments["passes"] = pass_sizes(lengths, tokens_of_overhead(model))

    def score() -> None:
        completion_scores(model, *rows, **arguments)

    return score
