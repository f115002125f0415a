"""Which rank a process is, as its environment says it: whole, or refused."""

from __future__ import annotations

import pytest

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.ranks import check_environment

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
HOST = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}


@pytest.fixture
def environment(monkeypatch):
    def given(**values):
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return given


OF_TWO = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize("values, line", [
    ({"RANK": "1", "WORLD_SIZE": "4"}, "RANK=1 of WORLD_SIZE=4 without MASTER_ADDR and MASTER_POR"),
    (OF_TWO | {"MASTER_ADDR": "a"}, "RANK=0 of WORLD_SIZE=2 without MASTER_PORT: "),
    (OF_TWO | {"MASTER_PORT": "1"}, "RANK=0 of WORLD_SIZE=2 without MASTER_ADDR: "),
    (OF_TWO | HOST | {"MASTER_ADDR": ""}, "RANK=0 of WORLD_SIZE=2 without MASTER_ADDR: "),
    ({"RANK": "2"}, "RANK=2, but WORLD_SIZE is not set: start ranks with torchrun"),
    ({"RANK": "4", "WORLD_SIZE": "4"} | HOST, "RANK=4, but WORLD_SIZE=4: "),
    (OF_TWO | HOST | {"RANK": "one"}, "RANK='one' is not a whole number: "),
    (OF_TWO | HOST | {"RANK": "-1"}, "RANK='-1' is not a whole number: "),
    (OF_TWO | HOST | {"LOCAL_RANK": "x"}, "LOCAL_RANK='x' is not a whole number: "),
    (OF_TWO | HOST | {"MASTER_PORT": "ssh"}, "MASTER_PORT='ssh' is not a whole number: "),
])  # fmt: skip
def test_half_an_environment_is_refused_in_one_line(values, line, environment):
    environment(**values)
    with pytest.raises(ConfigError) as caught:
        check_environment()
    said = str(caught.value)
    assert said.startswith(line) and "\n" not in said
    assert "launch.num_processes=N" in said and said.endswith("RANK")


@pytest.mark.parametrize("values", [
    {}, {"WORLD_SIZE": "4"}, {"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "1"},
    {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"} | HOST,
])  # fmt: skip
def test_a_whole_environment_and_none_are_taken(values, environment):
    environment(**values)
    check_environment()
