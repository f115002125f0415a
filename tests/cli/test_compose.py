"""What is refused before torch is imported."""

from __future__ import annotations

import ctypes
from fnmatch import fnmatch
from types import SimpleNamespace

import pytest

from grpo_ustat.cli import compose
from grpo_ustat.cli.compose import parse
from grpo_ustat.cli.hydra_api import hydra_session, split_sweep
from grpo_ustat.config.load import CONF
from grpo_ustat.config.schema import ConfigError


@pytest.mark.slow
@pytest.mark.parametrize("words, line", [
    (["lora=r16"], "lora.r=16 needs the package peft: pip install -e '.[cli,lora]'"),
    (["rollout=vllm"], "rollout=vllm needs the package vllm: pip install -e '.[cli,vllm]', or use "
     "rollout=local"),
])  # fmt: skip
def test_a_package_that_a_run_needs_is_missed_before_anything_is_imported(monkeypatch, words, line):
    monkeypatch.setattr(compose, "is_installed", lambda _: False)
    with pytest.raises(ConfigError) as caught:
        parse("train", words)
    assert str(caught.value) == line
    parse("train", [*words, "dry_run=true"])
    monkeypatch.setattr(compose, "is_installed", lambda _: True)
    parse("train", words)


@pytest.mark.parametrize("version, driver, reason", [
    ("cuda: Optional[str] = None\nhip: Optional[str] = None", True, "PyTorch is built without"),
    ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None", False, "no NVIDIA driver"),
    ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None", True, None),
    ("cuda: Optional[str] = None\nhip: Optional[str] = '6.2'", False, None),
])  # fmt: skip
def test_cuda_is_missed_before_pytorch_is_imported(version, driver, reason, monkeypatch, tmp_path):
    def load(name):
        if not driver:
            raise OSError(name)

    (tmp_path / "version.py").write_text(version)
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(compose.importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(compose.sys, "platform", "linux")
    config = SimpleNamespace(launch=SimpleNamespace(device="cuda:1"))
    if reason is None:
        compose.check_cuda(config, False)
        return
    with pytest.raises(ConfigError, match=f"launch.device=cuda:1 cannot be used .*{reason}"):
        compose.check_cuda(config, False)
    if not driver:
        compose.check_cuda(config, True)


@pytest.mark.parametrize("include, exclude", [
    (["*"], []), (["tiny*"], []), (["tiny*", "hub"], ["*base"]), (["*m", "t*"], ["q*", "*n*"]),
])  # fmt: skip
def test_glob_in_a_sweep_is_the_choices_whose_names_match(include, exclude, tmp_path):
    """As Hydra takes it: the group's files in their order, with `fnmatch` as the reference."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tiny_own.yaml").write_text("defaults: [tiny, _self_]\n")
    names = {file.stem for file in [*(CONF / "model").glob("*.yaml"), *tmp_path.glob("model/*")]}
    expected = [
        name for name in sorted(names)
        if any(fnmatch(name, one) for one in include) and not any(fnmatch(name, o) for o in exclude)
    ]  # fmt: skip
    given = f"[{','.join(include)}]" + (f",exclude=[{','.join(exclude)}]" if exclude else "")
    with hydra_session("mse", str(tmp_path)):
        runs = split_sweep([f"model=glob({given})", "seed=1,2"])
    assert runs == [[f"model={name}", f"seed={n}"] for name in expected for n in (1, 2)]


@pytest.mark.slow
def test_a_sweep_over_glob_is_planned_and_one_over_nothing_refused():
    planned = parse("mse", ["-m", "model=glob(tiny*,exclude=*direct)"]).planned_runs
    assert [one.name for one in planned] == ["model=tiny", "model=tiny_base"]
    assert [one.config.model.name for one in planned] == ["tiny", "tiny_base"]
    for word, line in (
        ("model=glob(nope*)", r"model=glob\(nope\*\) matches none of hub, .*tiny, tiny_base"),
        ("model=glob()", r"model=glob\(\): the value cannot be read: check its brackets"),
        ("model=glob(tiny*),hub", r"model=glob\(tiny\*\),hub: write one glob\(\[PATTERN,NAME\]\)"),
        ("seed=range(0,0)", r"seed=range\(0,0\) contains no values"),
        ("seed=interval(0,1)", r"interval\(0,1\): a sweep needs a list of values"),
        ("seed=glob(*)", r"seed=glob\(\*\) contains no values"),
    ):
        with pytest.raises(ConfigError, match=line):
            parse("mse", ["-m", word])
