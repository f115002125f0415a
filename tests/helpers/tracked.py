"""Run folders as a run leaves them, written by hand, and what trackers have stored of them."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pyarrow
import yaml
from pyarrow import parquet

from grpo_ustat.runs.files import write_whole
from grpo_ustat.runs.log import COLUMNS

PNG = bytes.fromhex(  # a grey pixel
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c6360000000020001e221bc33"
    "0000000049454e44ae426082"
)


class Folder:
    """A run folder that is written bit by bit."""

    def __init__(self, path, **config):
        self.path = path
        (path / ".hydra").mkdir(parents=True)
        (path / ".hydra" / "config.yaml").write_text(yaml.safe_dump({"seed": 0} | config))
        (path / "code.json").write_text(json.dumps({"commit": "c0ffee", "diff": "hf_secret"}))
        self.steps = []

    def rows(self, *steps, shift=0.0):
        with (self.path / "metrics.jsonl").open("a") as file:
            for step in steps:
                file.write(json.dumps(row(step, shift)) + "\n")
        self.steps += steps

    def rewind(self, step):
        """What a run that goes on from a checkpoint does."""
        kept = [s for s in self.steps if s <= step]
        write_whole(self.path / "metrics.jsonl", "".join(json.dumps(row(s)) + "\n" for s in kept))
        self.steps = kept

    def completions(self, *steps):
        made = [dict.fromkeys(COLUMNS.names) | {"step": s, "completion": f"={s}"} for s in steps]
        table = pyarrow.Table.from_pylist(made, schema=COLUMNS)
        parquet.write_table(table, self.path / ".staged")
        (self.path / ".staged").replace(self.path / "completions.parquet")

    def evals(self, *steps):
        lines = [f"{s},test,sampled,{s / 8},\n" for s in steps]
        text = "step,split,decoding,mean_reward,pass@2\n" + "".join(lines)
        write_whole(self.path / "eval.csv", text)

    def finish(self, **result):
        (self.path / "figure.png").write_bytes(PNG)
        write_whole(self.path / "result.json", json.dumps(result))


def row(step, shift=0.0):
    """Of metrics.jsonl; the time differs at every call."""
    row.calls += 1
    found = {"step": step, "reward": step / 7 + shift, "tokens": 10**12 + step, "kl": None}
    return found | {"monitor/c1_reason": "silent", "step_time": 0.1 * row.calls}


row.calls = 0


def timeless(values):
    return {k: v for k, v in values.items() if k not in ("step_time", "_timestamp", "_runtime")}


def wandb_records(folder):
    """Every record of every session off line, of the files as wandb-core writes them."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for file in sorted(Path(folder).glob("**/offline-run-*/run-*.wandb")):
        for data in _leveldb(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            found.append(record)
    return found


def wandb_history(folder):
    """Rows off line, in order, as dictionaries."""
    kept = [r.history for r in wandb_records(folder) if r.WhichOneof("record_type") == "history"]
    keyed = [{(i.key or "/".join(i.nested_key)): i.value_json for i in h.item} for h in kept]
    return [{key: json.loads(text) for key, text in values.items()} for values in keyed]


def _leveldb(data, block=32768):
    at, part = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield part
            part = b""
