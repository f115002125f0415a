"""The configuration of a tracker: what is refused, and that it is no part of what a run is."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from commands import compose

from grpo_ustat.config.identity import identity
from grpo_ustat.config.run import LoggerConfig
from grpo_ustat.config.schema import ConfigError


def asked(**given):
    return LoggerConfig(**({"name": "wandb", "project": "p", "finish_seconds": 1} | given))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"name": "tensorbord"}, "unknown logger.name 'tensorbord': did you mean tensorboard"),
        ({"finish_seconds": -1}, "logger.finish_seconds=-1 must be 0 or more"),
        ({"project": ""}, "logger=wandb needs logger.project=NAME"),
    ],
)
def test_a_wrong_logger_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        asked(**given).check()


def test_a_package_that_is_missing_is_refused_before_any_work(monkeypatch, tmp_path):
    """Also where a tracker left a folder of its name, which Python takes for a package."""
    (tmp_path / "trackio").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    sys.modules.pop("trackio", None)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=r"trackio: pip install -e '.\["):
        asked(name="trackio").check()
    asked(name="trackio").check(needed=False)


def test_a_logger_is_no_part_of_what_a_run_is(monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    with_wandb = compose("train", "logger=wandb")
    assert with_wandb.logger.project == "mine"
    assert identity(with_wandb) == identity(compose("train"))


def test_a_key_in_a_configuration_is_refused_unseen():
    key = "hf_" + "a1" * 15
    with pytest.raises(ConfigError, match="prompt.template") as caught:
        compose("train", f"prompt.template='{{question}} {key}'")
    assert key not in str(caught.value)
