"""The configuration of a tracker, and that it is no part of what a run is."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from commands import compose

from grpo_ustat.config.identity import identity
from grpo_ustat.config.schema import ConfigError


def test_a_package_that_is_missing_is_refused_before_any_work(monkeypatch, tmp_path):
    """Also where a tracker left a folder of its name, which Python takes for a package."""
    config = compose("train")
    (tmp_path / "trackio").mkdir()
    (tmp_path / "mlflow").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name, line in (("trackio", r"pip install -e '.\["), ("mlflow", "pip install mlflow")):
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        config.logger = name
        with pytest.raises(ConfigError, match=f"{name}: {line}"):
            config.check()
    config.dry_run = True
    config.check()


def test_a_logger_is_no_part_of_what_a_run_is():
    with_wandb = compose("train", "logger=wandb", "project=mine")
    assert with_wandb.project == "mine"
    assert identity(with_wandb) == identity(compose("train"))


def test_a_key_in_a_configuration_is_refused_unseen():
    key = "hf_" + "a1" * 15
    with pytest.raises(ConfigError, match="prompt.template") as caught:
        compose("train", f"prompt.template='{{question}} {key}'")
    assert key not in str(caught.value)
