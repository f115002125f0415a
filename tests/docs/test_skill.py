"""The skill for agents: its front matter, and its commands on what the repository has."""

from __future__ import annotations

import re
import shutil

import pytest
from readme import PAGES, ROOT, commands
from warm import run_python

NAME = "grpo-ustat"
SKILL = PAGES[f"docs/skills/{NAME}/SKILL.md"]
CHECKPOINT = ROOT / "grpo_ustat/assets/tiny_base"  # wrote the log of docs/examples
SHORT = {"seed=0,1,2": "seed=0"}
FEWER = ["debug=train", "max_steps=1", "budget.rollouts=64"]  # after what is typed


@pytest.mark.nightly(minutes=1.5)
def test_its_five_commands_answer(tmp_path):
    """In their order, each from what the one before left, in the words that the skill explains."""
    log = tmp_path / "outputs/trl"
    shutil.copytree(ROOT / "docs/examples/trl", log)
    (log / "checkpoint-9").symlink_to(CHECKPOINT)
    ran = []
    for words in commands(SKILL):
        if words[0] == "grpo-ustat":
            verb, *arguments = [SHORT.get(word, word) for word in words[1:]]
            arguments += FEWER if verb == "train" else []
            done = run_python("-m", "grpo_ustat", verb, *arguments, cwd=tmp_path)
            assert done.returncode == 0, (words, done.stderr)
            ran.append((verb, " ".join(done.stdout.split())))
    assert [verb for verb, _ in ran] == ["advise", "convert", "mse", "mse", "train"]
    advice, converted, answer, efficiency, _ = [said for _, said in ran]
    assert "do not show which num_generations" in advice and "Zero-variance groups" in advice
    assert "1600 of 1600 rows" in converted
    assert re.search(r"G is about \d+\.\d \[\d+\.\d, \d+\.\d\]. .* use G = 8: its", answer)
    assert re.search(r"is \d+ % noise .*; at n = \d+ it is half noise", answer)
    # 100 prompts are too few.
    assert re.search(r"relative efficiency of trl_dapo .* is not decided", efficiency)
    assert all("next: " in said for _, said in ran[:4])
    assert len([*tmp_path.glob("outputs/train/*/seed-0/result.json")]) == 3
