"""What seven frameworks leave on disk, written as their code writes it, and what `convert` makes of
it.
"""

from __future__ import annotations

import json

import pyarrow
from pyarrow import parquet

from grpo_ustat.logs.convert import convert
from grpo_ustat.logs.formats import FORMATS, detect
from grpo_ustat.logs.rows import Options

PROMPTS, SIZE = 3, 5


def samples(seed, prompts=PROMPTS, size=SIZE, first=0):
    """(group, place in it, prompt, completion, reward, log-probabilities) of one step; no two rows
    of one seed or of two are alike.
    """
    for p in range(prompts):
        for i in range(size):
            ids = [20 + seed, 40 + i, 60 + p, 9]
            yield first + p, i, [1, 2 + p], ids, float((i + p) % 2), [-0.1 - 0.01 * i - seed] * 4


def append(path, objects):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in objects)


def converted(source, name=None, options=Options()):  # noqa: B008  # frozen
    """The conversion, and the rows that it wrote, or none where it is refused."""
    one = FORMATS[name] if name else detect(source)
    target = source.parent / f"{len(list(source.parent.iterdir()))}.parquet"
    conversion = convert(source, one, target, options)
    return conversion, parquet.read_table(target).to_pylist()


def left_out(conversion, *words):
    """How many rows were left out for a reason with one of the words."""
    assert conversion.rows == conversion.kept + sum(conversion.reasons.values())
    return sum(n for reason, n in conversion.reasons.items() if any(x in reason for x in words))


def texts(ids):
    return " ".join(map(str, ids))


def episode(g, i, prompt, ids, reward, logprobs, version=4, named="traces", **changes):
    """With the generation prompt's token before the sampled ones, which have the log-probabilities,
    as `MessageNode` has them.
    """
    trace = {
        "nodes": [
            {"parent": None, "sampled": False, "token_ids": prompt[:1], "mask": [False]},
            {"parent": 0, "sampled": True, "token_ids": [*prompt[1:], *ids],
             "mask": [False, True, True, True, True], "logprobs": logprobs},
        ],
        "rewards": {"right": {"score": reward, "weight": 1.0}}, "ok": True,
        "agent": {"name": "solver", "trainable": True}, "calls": [{"finish_reason": "stop"}],
    }  # fmt: skip
    work = {"type": "train", "step": 5, "policy": {"start": version, "end": version}}
    work |= changes.pop("work", {})
    run = {"type": "train", "id": changes.pop("launch", "first"), "work": work}
    one = {"group": {"id": f"g{g}v{version}"}, "run": run, "ok": True, "traces": [trace | changes]}
    if named == "traces":
        one["traces"][0]["id"] = f"{ids}{logprobs}"
    return one | ({} if named == "nothing" else {"id": f"{ids}"})


def cohort(run, step, kind="train", subset="all"):
    return run / f"rollouts/step_{step}/{kind}/{subset}/traces.jsonl"


def nemo(path, seed, **changes):
    append(path, [
        {
            "rewards": [reward], "input_lengths": [len(prompt) + len(ids)],
            "token_ids": [[*prompt, *ids, 0]],
            "token_loss_mask": [[0] * len(prompt) + [1] * len(ids) + [0]],
            "sample_loss_mask": [1.0], "generation_logprobs": [[0.0, 0.0, *logprobs, 0.0]],
            "idx": k,
        } | {name: [values[k]] for name, values in changes.items()}
        for k, (_, _, prompt, ids, reward, logprobs) in enumerate(samples(seed))
    ])  # fmt: skip


def open_instruct(path, seed, step, rows=PROMPTS * SIZE):
    append(path, [
        {"step": step, "sample_idx": k, "prompt_idx": g, "prompt_tokens": prompt,
         "response_tokens": ids, "reward": reward, "finish_reason": "stop", "logprobs": logprobs}
        for k, (g, _, prompt, ids, reward, logprobs) in enumerate(samples(seed))
        if k < rows
    ])  # fmt: skip


def slime(path, seed, rollout=3, **changes):
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": rollout, "samples": [
        {"group_index": g, "tokens": prompt + ids, "response_length": len(ids), "reward": reward,
         "loss_mask": [1] * len(ids), "status": "completed", "rollout_log_probs": logprobs}
        | {name: values[k] for name, values in changes.items()}
        for k, (g, _, prompt, ids, reward, logprobs) in enumerate(samples(seed))
    ]}, path)  # fmt: skip


def verl(path, seed, step, **changes):
    append(path, [
        {"input": texts(prompt), "output": texts(ids), "score": reward, "step": step}
        | {name: values[k] for name, values in changes.items()}
        for k, (_, _, prompt, ids, reward, _) in enumerate(samples(seed))
    ])  # fmt: skip


def trl(path, seed, step, **changes):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = list(samples(seed))
    parquet.write_table(pyarrow.table({
        "step": [step] * 15, "prompt": [texts(row[2]) for row in rows],
        "completion": [texts(row[3]) for row in rows], "right": [row[4] for row in rows],
        "advantage": [0.0] * 15,
    } | changes), path)  # fmt: skip


def ms_swift(path, seed, step):
    rows = list(samples(seed))
    append(path, [{
        "step": [str(step)] * 15, "prompt": [texts(row[2]) for row in rows],
        "completion": [texts(row[3]) for row in rows], "right": [row[4] for row in rows],
        "solution": ["x"] * 15, "advantages": [0.0] * 15,
    }])  # fmt: skip
