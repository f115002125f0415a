"""`--cfg`: what is printed, and that each wrong request is one line."""

from __future__ import annotations

import pytest
import yaml
from slow_cases import slow_after

from grpo_ustat.cli.hydra_api import parse_arguments
from grpo_ustat.cli.show_config import show_config
from grpo_ustat.config.schema import ConfigError


def shown(capsys, line, entry="mse"):
    show_config(entry, parse_arguments(line.split()))
    return capsys.readouterr().out


@pytest.mark.slow(minutes=0.02)
def test_the_configuration_of_the_job_or_of_hydra_or_both(capsys):
    job = yaml.safe_load(shown(capsys, "--cfg job seed=3 baseline_options.group_std.epsilon=0.5"))
    assert job["seed"] == 3 and "hydra" not in job
    assert job["baseline_options"]["group_std"] == {"epsilon": 0.5}
    assert list(yaml.safe_load(shown(capsys, "--cfg hydra"))) == ["hydra"]
    assert {"hydra", "seed"} < set(yaml.safe_load(shown(capsys, "--cfg all", "train")))


@pytest.mark.slow
def test_a_part_and_what_it_refers_to(capsys):
    """Hydra's own way looks `${output_root}` up in Hydra's node, and ends in a traceback."""
    assert shown(capsys, "--cfg job -p model.name") == "tiny_base\n"
    assert shown(capsys, "--cfg job -p pool") == "null\n"
    assert shown(capsys, "--cfg job -p budget").startswith("# @package budget\npool_completions: ")
    place = shown(capsys, "--cfg hydra -p hydra.run.dir output_root=far seed=1")
    assert place.startswith("far/mse/tiny_base-") and place.endswith("/seed-1\n")
    resolved = yaml.safe_load(shown(capsys, "--cfg hydra --resolve"))
    assert resolved["hydra"]["run"]["dir"].startswith("outputs/mse/tiny_base-")


@pytest.mark.parametrize(
    "line, refusal",
    slow_after(
        3,
        [
            ("--cfg job -p nosuch", "--package=nosuch: --cfg job has no such part"),
            ("--cfg job -p hydra.run", "--package=hydra.run: --cfg job has no such part"),
            ("--cfg job bogus=1", "unknown key bogus"),
            ("--cfg job model=nosuch", "unknown model 'nosuch': choose from hub"),
            ("--cfg job seed=1,2", "seed=1,2 has several values"),
            (
                "-m --cfg job seed=1,2",
                "--multirun and --cfg cannot be combined: use only one of them",
            ),
            (
                "--cfg job --info plugins",
                "--cfg and --info cannot be combined: use only one of them",
            ),
            (
                "--cfg job --resolve +note=${nosuch}",
                "--cfg job: Interpolation key 'nosuch' not found",
            ),
        ],
    ),
)
def test_a_wrong_request_is_one_line(line, refusal, capsys):
    with pytest.raises(ConfigError, match=refusal) as caught:
        shown(capsys, line)
    assert "\n" not in str(caught.value)
