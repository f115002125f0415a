"""Logs are read without PyTorch: what `advise` and `convert` import, and for which forms."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from grpo_ustat.advise.__main__ import EXAMPLES

HEAVY = {"torch", "transformers", "hydra", "omegaconf", "accelerate", "matplotlib", "psutil"}
CODE = """
import sys
from grpo_ustat.__main__ import main
heavy = set(sys.argv.pop(1).split(","))
try:
    main()
finally:
    print("imported:", sorted(heavy & set(sys.modules)), len(sys.modules))
"""


def imported(arguments, cwd):
    """What a command prints, and the heavy modules that it imports."""
    command = [sys.executable, "-c", CODE, ",".join(HEAVY), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    text, _, modules = done.stdout.rpartition("imported: ")
    return text, modules.split("]")[0].strip("[")


ROWS = [{"prompt_id": k // 4, "reward": k % 3 % 2} for k in range(80)]
DUMP = [{"input": f"q{k // 4}", "output": "a", "score": k % 3 % 2, "step": 3} for k in range(80)]
STATE = {
    "global_step": 40,
    "log_history": [{"step": k, "reward": 0.5, "frac_reward_zero_std": 0.25} for k in range(1, 41)],
}


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("rewards.jsonl", "\n".join(map(json.dumps, ROWS)), "20 prompts with 4 completions"),
        ("rollout/3.jsonl", "\n".join(map(json.dumps, DUMP)), "verl: 80 of 80 rows"),
        ("trainer_state.json", json.dumps(STATE), "The log has 40 rows"),
    ],
)
def test_a_log_is_read_without_torch(tmp_path, name, text, said):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    printed, heavy = imported(["advise", path, "num_generations=4"], tmp_path)
    assert said in " ".join(printed.split()) and heavy == ""


def test_convert_imports_no_torch(tmp_path):
    (tmp_path / "3.jsonl").write_text("\n".join(map(json.dumps, DUMP)))
    printed, heavy = imported(["convert", "3.jsonl", "out.parquet"], tmp_path)
    assert "80 of 80 rows" in printed and heavy == ""


def test_the_help_has_at_most_40_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    command = [sys.executable, "-m", "grpo_ustat", "advise", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().count("\n") < 40
    assert all(f" advise {words}" in done.stdout for words in EXAMPLES)
