"""Whose files they are: by names and fields, among files of others."""

from __future__ import annotations

import json

import pytest

from grpo_ustat.logs.dumps import DUMPS, dump_of, files_of, first_fields


def write(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


VERL = {"input": "a", "output": "b", "score": 1.0}


def test_files_are_read_in_the_order_of_their_numbers(tmp_path):
    for step in (10, 9, 100):
        write(tmp_path / f"run/{step}.jsonl", VERL)
    names = [path.stem for path in files_of(tmp_path, DUMPS["verl"])]
    assert names == ["9", "10", "100"] and dump_of(tmp_path).name == "verl"


def test_files_of_others_are_passed_by_and_damaged_ones_are_not(tmp_path):
    write(tmp_path / "a_metrics.jsonl", {"loss": 1.0})
    write(tmp_path / "1.jsonl", VERL)
    (tmp_path / "2.jsonl").write_text('{"input": "cut o')
    (tmp_path / "empty.jsonl").touch()
    assert [path.name for path in files_of(tmp_path, DUMPS["verl"])] == ["1.jsonl", "2.jsonl"]
    assert first_fields(tmp_path / "2.jsonl") is None


@pytest.mark.parametrize("rows", [[{"prompt": "q", "completion": "a", "reward": 1.0}], []])
def test_a_table_of_rewards_is_no_dump(tmp_path, rows):
    """Its name is that of ms-swift's file, whose columns are lists."""
    assert dump_of(write(tmp_path / "completions.jsonl", *rows)) is None
    assert dump_of(tmp_path) is None


def test_a_renamed_file_is_known_by_its_fields(tmp_path):
    path = write(tmp_path / "step_5.jsonl", {"traces": [], "ok": False})
    assert dump_of(path).name == "prime_rl" and files_of(path, DUMPS["prime_rl"]) == [path]
    assert files_of(path, DUMPS["nemo_rl"]) == []


def test_pickles_are_searched_and_not_loaded(tmp_path):
    """Of two that hold tensors the one with samples of slime is known; neither is run."""
    torch = pytest.importorskip("torch")
    sample = {"tokens": [1], "response_length": 1}
    for name, content in (("3.pt", {"rollout_id": 3, "samples": [sample]}), ("optim.pt", {"a": 1})):
        torch.save(content | {"tensor": torch.ones(2)}, tmp_path / name)
    (tmp_path / "old.pt").write_bytes(b"no archive")
    assert dump_of(tmp_path).name == "slime"
    assert [path.name for path in files_of(tmp_path, DUMPS["slime"])] == ["3.pt", "old.pt"]
    (tmp_path / "3.pt").unlink()
    assert dump_of(tmp_path) is None
