"""What a checkout holds, and a multirun and two processes as the pages show them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run

ROOT = Path(__file__).parents[2]


def test_of_outputs_only_the_page_about_it_is_in_git():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "outputs"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert listed.stdout.split() == ["outputs/README.md"]
    left = ["outputs/train/a/seed-0/result.json", "outputs/report/a/report.html", "outputs/x.csv"]
    done = subprocess.run(
        ["git", "check-ignore", *left, "outputs/README.md"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == left


def unnamed(page, files):
    """The files that a page about a folder does not name, themselves or a folder of theirs."""
    names = set()
    for quoted in re.findall(r"`([^`]+)`", page):
        stem, endings = re.match(r"([^{]*)(?:\{(.*)\})?", quoted).groups()
        names |= {(stem + ending).rstrip("/") for ending in (endings or "").split(",")}
    return {
        str(path) for path in files
        if not names & {str(path), *path.parts[:-1], re.sub(r"\d+", "STEP", path.parts[0])}
    }  # fmt: skip


def test_a_file_that_a_page_does_not_name():
    files = map(Path, ("a.pdf", "a.svg", "a.csv", "pool/x", "checkpoint-2/y", ".hydra/c.yaml"))
    page = "| `a.{pdf,svg}` `pool/` `checkpoint-STEP/` | `.hydra/c.yaml`"
    assert unnamed(page, files) == {"a.csv"}


def test_embedded_policies_are_small():
    for model in (ROOT / "grpo_ustat" / "assets").glob("*/config.json"):
        assert sum(file.stat().st_size for file in model.parent.iterdir()) <= 1_000_000


@pytest.mark.nightly(minutes=1)
def test_a_sweep_gives_every_job_its_own_folder(tmp_path):
    sweep = ("-m", "group_size=4,8", "seed=0,1", "debug=train")
    code, _, err = run("train", *sweep, cwd=tmp_path)
    assert code == 0, err
    results = sorted(tmp_path.glob("outputs/train/*/seed-*/result.json"))
    assert len(results) == 4
    folder = results[0].parent
    left = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    assert unnamed((ROOT / "outputs" / "README.md").read_text(), left) == set()
    names = {(p.parts[-3].rpartition("-n-")[0][-3:], p.parts[-2]) for p in results}
    assert names == {(g, s) for g in ("G-4", "G-8") for s in ("seed-0", "seed-1")}
    accuracies = {json.loads(p.read_text())["tokens"] for p in results}
    assert len(accuracies) == 4  # four different runs
    code, out, _ = run("train", *sweep, cwd=tmp_path)
    assert code == 0 and out.count("done already") == 4


@pytest.mark.nightly(minutes=1)
def test_two_processes_draw_and_learn_as_one(tmp_path):
    """torchrun with two gloo ranks: the same rewards and lengths, weights equal to rounding."""
    import torch
    from safetensors.torch import load_file

    arguments = ["debug=train", "model.dtype=float64", "group_size=4", "micro_batch_tokens=300"]
    code, _, err = run("train", *arguments, "hydra.run.dir=one", cwd=tmp_path)
    assert code == 0, err
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launcher, "-m", "grpo_ustat.train", *arguments, "hydra.run.dir=two"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    for a, b in zip(*rows, strict=True):
        for key in ("reward", "completions/mean_length", "num_tokens", "frac_reward_zero_std"):
            assert a[key] == b[key], key
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-6)
    one, two = (load_file(tmp_path / n / "checkpoint-2/model.safetensors") for n in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=1e-6, atol=1e-9)
