"""Cost of exact scores against an ordinary forward and backward of the same batch.

    python scripts/benchmarks/scores.py FOLDER [--rows 16 --prompt 40 --completion 88 --repeats 5]
    python scripts/benchmarks/scores.py qwen2.5-0.5b --device cuda --dtype bfloat16 \\
        --rows 64 --prompt 40 --completion 256
    python scripts/benchmarks/scores.py FOLDER --rows 32 --completion 256 --spread 0.6 \\
        --programs study passes layers passes-layers

`qwen2.5-0.5b` stands for random weights of that shape. Programs take turns, each in a process
of its own: `ordinary` (log-probabilities of the completions, backward to all parameters), `scores`
(squared norms and one pooled gradient), `gram` (with the Gram matrix) and `study` (with the Gram
matrix, 2 pooled gradients and the sketches that a study keeps) and `layers` (as `study`, each layer
computed twice). `passes` and `passes-layers` are as these with completions of similar length in a
pass, as studies do; with `--spread` lengths are log-normal of this sigma, the longest
`--completion`. Printed: medians, ratios of medians to the first program, peak memory above the
loaded model, tokens with their padding a second, and the share of the rate at which this machine
multiplies matrices.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import platform
import resource
import statistics
import time

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from grpo_ustat.policy.logprobs import Rows, completion_logprobs
from grpo_ustat.policy.scores.backward import completion_scores, parameter_sizes
from grpo_ustat.policy.scores.rollouts import pass_sizes, tokens_of_overhead
from grpo_ustat.policy.scores.sketch import Sketch

PROGRAMS = ("ordinary", "scores", "gram", "study", "layers", "passes", "passes-layers")
QWEN = dict(
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
    num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip


def load(asked):
    dtype = getattr(torch, asked.dtype)
    if asked.model == "qwen2.5-0.5b":
        model = AutoModelForCausalLM.from_config(Qwen2Config(**QWEN), dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(asked.model, dtype=dtype)
    return model.to(asked.device).eval()


def batch(asked, vocabulary):
    generator = torch.Generator().manual_seed(0)
    shape = (asked.rows, asked.prompt + asked.completion)
    ids = torch.randint(0, vocabulary, shape, generator=generator)
    ids[:, : asked.prompt] = ids[0, : asked.prompt]
    lengths = torch.empty(asked.rows).log_normal_(0, asked.spread, generator=generator).sort()[0]
    lengths = (asked.completion * lengths / lengths[-1]).ceil()
    columns = torch.arange(shape[1]) - asked.prompt
    attention = (columns < lengths[:, None]).long()
    completion = attention * (columns >= 0)
    return [x.to(asked.device) for x in (ids, attention, completion)]


def program(name, model, rows, asked):
    weights = torch.linspace(-1, 1, asked.rows, device=asked.device)
    if name == "ordinary":

        def run():
            model.zero_grad(set_to_none=True)
            packed = Rows(*rows, width=asked.completion)
            (completion_logprobs(model, packed) * weights).sum().backward()

        return run
    if name not in ("scores", "gram"):
        sizes = parameter_sizes(model)
        features, pooled = Sketch(sizes, 1021), Sketch(sizes, 32749)
        both = torch.stack([weights, torch.ones_like(weights)])
        passes = pass_sizes(rows[1].sum(dim=1).cpu().numpy(), tokens_of_overhead(model))
        return lambda: completion_scores(
            model, *rows, weights_KB=both, gram=True, features=features, pooled=pooled,
            by_layer="layers" in name, passes=passes if "passes" in name else None,
        )  # fmt: skip
    return lambda: completion_scores(model, *rows, weights_KB=weights[None], gram=name == "gram")


def memory(asked):
    if asked.device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(name, asked, pipe):
    """Run the program once for every message; answer with seconds and peak bytes."""
    torch.set_num_threads(asked.threads)
    model = load(asked)
    run = program(name, model, batch(asked, model.config.vocab_size), asked)
    before = memory(asked)
    total = sum(p.numel() for p in model.parameters())
    ends = {id(m.weight): m.weight.numel() for m in (model.get_input_embeddings(), model.lm_head)}
    pipe.send((total, total - sum(ends.values()), model.lm_head.weight.numel(), matrix_rate(asked)))
    while pipe.recv():
        start = time.perf_counter()
        run()
        if asked.device == "cuda":
            torch.cuda.synchronize()
        pipe.send((time.perf_counter() - start, memory(asked) - before))


def matrix_rate(asked):
    """Multiplications and additions a second of a large product."""
    size = 2048 if asked.device == "cpu" else 8192
    a = torch.randn(size, size, dtype=getattr(torch, asked.dtype), device=asked.device)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        (a @ a).sum().item()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--spread", type=float, default=0.0)
    for key, value in dict(rows=16, prompt=40, completion=88, repeats=5, threads=1).items():
        parser.add_argument(f"--{key}", type=int, default=value)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--programs", nargs="+", default=PROGRAMS[:5], choices=PROGRAMS)
    asked = parser.parse_args()
    context, pipes = mp.get_context("spawn"), {}
    for name in asked.programs:
        pipes[name], theirs = context.Pipe()
        context.Process(target=serve, args=(name, asked, theirs), daemon=True).start()
    facts = {name: pipe.recv() for name, pipe in pipes.items()}
    times, peaks = {name: [] for name in pipes}, dict.fromkeys(pipes, 0)
    for repeat in range(asked.repeats + 1):
        for name, pipe in pipes.items():
            pipe.send(True)
            seconds, peaks[name] = pipe.recv()
            if repeat:  # the first round warms up
                times[name].append(seconds)
    for pipe in pipes.values():
        pipe.send(False)
    report(asked, facts, times, peaks)


def report(asked, facts, times, peaks):
    parameters, body, head, _ = facts[next(iter(facts))]
    rate = max(fact[-1] for fact in facts.values())
    tokens = asked.rows * (asked.prompt + asked.completion)
    first = next(iter(times))
    base = statistics.median(times[first])
    print(f"{asked.model}: {parameters / 1e6:.1f} M parameters, {asked.dtype}, {asked.device},")
    completion = (
        f"{asked.completion}, spread {asked.spread:g}" if asked.spread else asked.completion
    )
    print(f"{asked.rows} rows x ({asked.prompt} + {completion}) tokens, {asked.repeats} turns")
    print(f"torch {torch.__version__}, {platform.machine()}, {asked.threads} thread(s), ", end="")
    print(f"matrix products at {rate / 1e9:.0f} GFLOP/s")
    print(f"{'':14}{'median s':>10}{'spread':>16}{'ratio':>8}{'peak MB':>9}{'ratio':>8}", end="")
    print(f"{'tokens/s':>10}{'of rate':>9}")
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        spread = f"{min(seconds):.2f} - {max(seconds):.2f}"
        print(f"{name:14}{middle:10.2f}{spread:>16}{middle / base:8.2f}", end="")
        print(f"{peaks[name] / 1e6:9.0f}{peaks[name] / max(1, peaks[first]):8.2f}", end="")
        # what ordinary training multiplies: forward once, backward twice, logits where needed
        work = 6 * (body * tokens + head * asked.rows * asked.completion)
        print(f"{tokens / middle:10.0f}{work / middle / rate:9.0%}")


if __name__ == "__main__":
    main()
