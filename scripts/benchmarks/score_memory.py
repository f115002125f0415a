"""Estimate the peak memory of scoring a large model layer by layer, without a GPU.

    python scripts/benchmarks/score_memory.py [--rows 2 --tokens 32 64]

The model has the shape of Qwen2.5-Math-7B in bfloat16, with one or two of its 28 layers, and reads
only a few tokens. The script counts the tensors of all operations while they exist, but not the
weights. Peaks are measured for both numbers of layers and for two numbers of tokens. These peaks
determine the bytes per token in the recomputed layer, the bytes per token in each further layer,
and a constant part. From these numbers the script extrapolates the peak for 28 layers and 32 x 3200
tokens. A GPU sums bfloat16 products in float32 without widening the factors. The script imitates
this on the CPU and does not count the widened factors. The chunks of gradients and logits are small
here, so that they do not grow with the number of tokens. The bytes of a GPU's larger chunks are
added afterwards.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from grpo_ustat.policy.limits import LOGIT_BYTES
from grpo_ustat.policy.scores import accumulate, completion_scores
from grpo_ustat.policy.scores.backward import parameter_sizes
from grpo_ustat.policy.scores.sketch import Sketch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/helpers"))
from live_bytes import LiveBytes, uncounted  # noqa: E402

SHAPE = dict(
    vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_attention_heads=28,
    num_key_value_heads=4, tie_word_embeddings=False, pad_token_id=None,
)  # fmt: skip
LAYERS, ROWS, TOKENS, PARAMETERS = 28, 32, 3200, 7_615_616_512
LOGIT_BYTES_HERE = 2**20
# Largest number of chunk-sized tensors that exist while a chunk is computed.
TEMPORARY = 4


def model_of(layers):
    """Make a model of the shape with `layers` layers; all weights are equal."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            Qwen2Config(num_hidden_layers=layers, **SHAPE), dtype=torch.bfloat16
        )
    rotary = type(model.model.rotary_emb)(model.config)
    model.to_empty(device="cpu")
    model.model.rotary_emb = rotary
    for parameter in model.parameters():
        parameter.data.fill_(0.01)
    return model.eval()


@uncounted
def wide_bmm(left, right, out=None):
    """Compute a batched product slice by slice in float32, as a GPU does."""
    shape = (len(left), left.shape[1], right.shape[2])
    result = left.new_empty(shape, dtype=torch.float32) if out is None else out
    for product, a, b in zip(result, left, right, strict=True):
        torch.mm(a.float(), b.float(), out=product)
    return result


def peak(model, rows, tokens):
    """Return the peak number of bytes while a batch is scored."""
    ids = torch.arange(rows * tokens).view(rows, tokens) % 1000
    ones = torch.ones_like(ids)
    completion = ones.clone()
    completion[:, :4] = 0
    sizes = parameter_sizes(model)
    features = Sketch(sizes, 509)
    pooled = Sketch(sizes, 16381, signs=features.signs)
    weights = torch.ones(2, rows, dtype=torch.float64)
    with LiveBytes() as meter:
        completion_scores(
            model, ids, ones, completion, weights, gram=True, features=features, pooled=pooled,
            by_layer=True,
        )  # fmt: skip
    return meter.peak


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs=2, default=(32, 64))
    options = parser.parse_args()
    accumulate.sums_wider = lambda left, right: left.dtype == right.dtype == torch.bfloat16
    accumulate.wide_bmm = wide_bmm
    LOGIT_BYTES["cpu"] = LOGIT_BYTES_HERE
    slopes, rests = [], []
    for layers in (1, 2):
        model = model_of(layers)
        few, many = (peak(model, options.rows, tokens) for tokens in options.tokens)
        slope = (many - few) / (options.rows * (options.tokens[1] - options.tokens[0]))
        slopes.append(slope)
        rests.append(few - slope * options.rows * options.tokens[0])
        print(
            f"{layers} layers: {few / 1e9:.3f} and {many / 1e9:.3f} GB, {slope:.0f} bytes per "
            "token",
            flush=True,
        )
    each = slopes[1] - slopes[0]
    token = slopes[0] + (LAYERS - 1) * each
    chunks = TEMPORARY * (LOGIT_BYTES["cuda"] + accumulate.GRADIENT_BYTES["cuda"])
    signs = PARAMETERS / 8
    total = token * ROWS * TOKENS + chunks + signs
    print(
        f"per token {slopes[0] / 1e3:.0f} kB and {each / 1e3:.1f} kB for each further layer: "
        f"{token / 1e3:.0f} kB with {LAYERS}, {token * ROWS * TOKENS / 1e9:.1f} GB for {ROWS} x "
        f"{TOKENS}; chunks {chunks / 1e9:.1f} GB, signs {signs / 1e9:.1f} GB: "
        f"{total / 1e9:.1f} GB, with weights {(total + 2 * PARAMETERS) / 1e9:.1f} GB; rest "
        f"{rests[0] / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    main()
