"""Dumps of the living verl with our recorder, read by `convert`: what nightly and the tests run.

    python tests/helpers/verl_dump.py FOLDER

Both of verl's trainers write them by their own `_log_rollout_data`: a real TransferQueue of real
Ray, filled up to whole minibatches by verl's own function, and a real DataProto of the older one.
The trainers are made without `__init__`, which needs GPUs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

STEP, PAD = 3, 0  # of training, whose weights are those of global_step_2
ROWS = [  # group, prompt, completion, mask, reward, written by
    (f"g{k // 4}", [5, 6, 7][k // 4 :], list(range(3, 5 + k % 3)), k % 4 / 2, (1, 2)[k != 7])
    for k in range(8)
]


def expected():
    """What is in each row: group, tokens, which of them the policy wrote, and log-probabilities."""
    for k, (group, prompt, ids, reward, first) in enumerate(ROWS):
        mask = [1] * (len(ids) - 1) + [int(k != 2)]  # a tool wrote the last token of one
        yield group, prompt, ids, mask, reward, [-0.5 - k / 8] * len(ids), first


def queued(folder):
    """By the trainer that verl 0.9 runs, from its TransferQueue."""
    import ray
    import torch
    import transfer_queue as tq
    from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    tq.init()
    fields, keys, tags = [], [], []
    for k, (group, prompt, ids, mask, reward, logprobs, first) in enumerate(expected()):
        scores = torch.zeros(len(ids))
        scores[-1] = reward
        kept = torch.tensor(mask)
        fields.append({
            "uid": group, "prompts": torch.tensor(prompt), "responses": torch.tensor(ids),
            "loss_mask": kept, "response_mask": 0 * kept,  # all rejected as too far off-policy
            "rm_scores": scores, "rollout_log_probs": torch.tensor(logprobs),
            "old_log_probs": torch.tensor(logprobs) - 0.125, "session_id": k % 4,
            "reward_model": {"ground_truth": "7"},
        })  # fmt: skip
        keys.append(f"{group}_{k % 4}_0")
        tags.append({"min_global_steps": first, "max_global_steps": 2, "seq_len": len(ids)})
    batch = tq.kv_batch_put(
        keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(fields), tags=tags
    )
    batch = upsample_batch_to_divisible_size(batch, 3, PAD)
    assert len(batch) == 9
    dump(object.__new__(PPOTrainerSync), folder, batch, {})
    tq.close()
    ray.shutdown()


def batched(folder):
    """By its older trainer, from a DataProto padded on the left and on the right."""
    import torch
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    def right(rows, width=6):
        return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])

    groups, prompts, ids, masks, rewards, logprobs, first = zip(*expected(), strict=True)
    left = right([row[::-1] for row in prompts]).flip(1)
    scores = torch.zeros(8, 6)
    scores[:, 0] = torch.tensor(rewards)
    tensors = {
        "prompts": left, "responses": right(ids), "response_mask": right(masks),
        "attention_mask": torch.cat([(left > 0).long(), right([[1] * len(x) for x in ids])], 1),
        "token_level_scores": scores, "rollout_log_probs": right(logprobs),
        "old_log_probs": right(logprobs) - 0.125,
    }  # fmt: skip
    others = {
        "uid": np.array(groups, dtype=object), "min_global_steps": np.array(first, dtype=object),
        "max_global_steps": np.array([2] * 8, dtype=object),
    }  # fmt: skip
    batch = DataProto.from_dict(tensors=tensors, non_tensors=others)
    dump(object.__new__(RayPPOTrainer), folder, batch, {}, {})


def dump(trainer, folder, *arguments):
    """Call the trainer's own method, as its `fit` does."""
    from transformers import AutoTokenizer

    import grpo_ustat

    model = Path(grpo_ustat.__file__).parent / "assets" / "tiny_base"
    trainer.tokenizer, trainer.global_steps = AutoTokenizer.from_pretrained(model), STEP
    trainer._init_dump_executor()
    trainer._log_rollout_data(*arguments, str(folder))
    trainer._shutdown_dump_executor()


def check(folder):
    """Whether the Parquet file has the rows, beside verl's dump, and `convert` takes them."""
    from pyarrow import parquet

    from grpo_ustat.logs.convert import convert
    from grpo_ustat.logs.formats import detect
    from grpo_ustat.logs.pairing import logged_policy_step
    from grpo_ustat.logs.rows import Options

    assert len((folder / f"{STEP}.jsonl").read_text().splitlines()) >= 8
    table = parquet.read_table(folder / f"{STEP}.parquet").to_pylist()
    for row, (group, prompt, ids, mask, reward, logprobs, _) in zip(table, expected(), strict=True):
        assert (row["uid"], row["prompt_ids"], row["completion_ids"]) == (group, prompt, ids)
        assert (row["response_mask"], row["score"], row["step"]) == (mask, reward, STEP)
        assert row["rollout_log_probs"] == logprobs
        assert row["old_log_probs"] == [x - 0.125 for x in logprobs]
    target = folder.parent / f"{folder.name}.parquet"
    one = detect(folder)
    conversion = convert(folder, one, target, Options())
    assert one.name == "verl_record" and conversion.exact
    assert (conversion.kept, conversion.groups) == (4, 1)  # of the other group one row is mixed
    assert set(conversion.reasons) == {
        "written by policies 1 to 2", "its prompt has fewer than 4 completions",
    }  # fmt: skip
    assert logged_policy_step(target) == 2
    assert [row["logprobs"] for row in parquet.read_table(target).to_pylist()] == [
        one[5] for one in list(expected())[:4]
    ]


def check_merger():
    """Whether verl's merger takes the command of docs/verl.md."""
    from readme import PAGES, commands
    from verl.model_merger.base_model_merger import parse_args

    words = next(w for w in commands(PAGES["docs/verl.md"]) if "verl.model_merger" in w)
    sys.argv = words[words.index("verl.model_merger") :]
    merge = parse_args()
    assert (merge.operation, merge.backend, merge.target_dir) == ("merge", "fsdp", "global_step_20")
    assert merge.local_dir.endswith("global_step_20/actor")


def main():
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "grpo_ustat.integrations.verl_record"
    import verl  # noqa: F401  # it imports our module

    folder = Path(sys.argv[1])
    for name, write in (("older", batched), ("queue", queued)):
        write(folder / name)
        check(folder / name)
    check_merger()
    print("verl writes", *sorted(str(x.relative_to(folder)) for x in folder.rglob("*.*")))


if __name__ == "__main__":
    main()
