"""The wheel in a clean environment, and the multirun that the README shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_config import run

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_a_wheel_finds_its_configurations(tmp_path):
    """Built, installed without torch, run from another folder as module and as command."""
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(pip, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    clean = tmp_path / "clean"
    subprocess.run([sys.executable, "-m", "venv", str(clean)], check=True)
    python = clean / "bin" / "python"
    needed = ["hydra-core", "omegaconf", "numpy", "psutil", "pyyaml", "rich"]
    install = [str(python), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*install, *needed], check=True)
    subprocess.run([*install, "--no-deps", str(wheel)], check=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    for command in ([str(python), "-m", "grpo_ustat.mse"], [str(clean / "bin/grpo-ustat-train")]):
        done = subprocess.run(
            [*command, "--cfg", "job"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        assert "embedded:tiny" in done.stdout
    assets = clean.glob("lib/*/site-packages/grpo_ustat/assets/*/model.safetensors")
    assert {p.parent.name for p in assets} == {"tiny", "tiny_base", "tiny_direct"}
    templates = clean.glob("lib/*/site-packages/grpo_ustat/runs/templates/*")
    assert {p.name for p in templates} == {"page.html.j2", "page.css", "page.js"}


def test_embedded_policies_are_small():
    for folder in (ROOT / "grpo_ustat" / "assets").iterdir():
        assert sum(f.stat().st_size for f in folder.iterdir()) <= 1_000_000


@pytest.mark.slow
def test_a_sweep_gives_every_job_its_own_folder(tmp_path):
    sweep = ("-m", "group_size=4,8", "seed=0,1", "debug=train")
    code, _, err = run("train", *sweep, cwd=tmp_path)
    assert code == 0, err
    results = sorted(tmp_path.glob("outputs/train/*/seed=*/result.json"))
    assert len(results) == 4
    names = {(p.parts[-3].rpartition("-n=")[0][-3:], p.parts[-2]) for p in results}
    assert names == {(g, s) for g in ("G=4", "G=8") for s in ("seed=0", "seed=1")}
    accuracies = {json.loads(p.read_text())["tokens"] for p in results}
    assert len(accuracies) == 4  # four different runs
    code, out, _ = run("train", *sweep, cwd=tmp_path)
    assert code == 0 and out.count("done already") == 4


@pytest.mark.slow
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
