"""Learning rate and completion length come from the model and the data set, unless they are set."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml
from commands import CONF, compose

from grpo_ustat.cli.compose import compose_config, parse
from grpo_ustat.config.identity import folder_name
from grpo_ustat.config.schema import ConfigError

HUB = ("model=org/name", "prompt=plain")
DEFAULTS = {  # words of train, then the learning rate and the completion length
    (): (1e-4, 96),
    ("model=tiny", "lora=r16"): (1e-4, 96),
    HUB: (1e-6, 96),
    (*HUB, "lora=r16"): (1e-5, 96),
    (*HUB, "lora=r16", "lora.r=8"): (1e-5, 96),
    (*HUB, "learning_rate=3e-6"): (3e-6, 96),
    (*HUB, "model.learning_rate=3e-6"): (3e-6, 96),
    ("model=qwen2_5_1_5b_instruct", "dataset=gsm8k", "prompt=gsm8k_chat"): (1e-6, 512),
    (*HUB, "dataset=gsm8k", "max_completion_length=64"): (1e-6, 64),
    (*HUB, "dataset=math500", "prompt=chat_boxed"): (1e-6, 3000),
    ("dataset=plus_one", "group_size=16"): (1e-4, 96),
}


@pytest.mark.slow
@pytest.mark.parametrize("words, values", DEFAULTS.items())
def test_values_fit_model_and_data_set(words, values):
    config = compose_config("train", ["dry_run=true", *words])
    assert (config.learning_rate, config.max_completion_length) == values


OVERLAYS = {  # of each overlay that names a model or a data set: learning rate, completion length
    "train": {
        "experiment=algorithm2": (1e-4, 96),
        "experiment=best_group_size": (7e-3, 96),
        "experiment=normalised_group_size": (7e-3, 96),
        "experiment=smollm2_group_size": (1e-3, 4),
        "experiment=figure5_gsm8k": (1e-6, 512),
        "experiment=figure5_offline": (1e-4, 96),
        "experiment=table2_math": (1e-6, 3000),
        "debug=train": (1e-4, 96),
    },
    "mse": {
        "experiment=monte_carlo_check": 96,
        "experiment=smollm2": 4,
        "experiment=verdicts": 96,
        "experiment=figure4": 256,
        "experiment=figure4_offline": 96,
        "experiment=figure4_smollm2": 4,
        "experiment=best_group_size_start": 96,
        "debug=mse": 96,
    },
}


@pytest.mark.slow(minutes=0.01)
@pytest.mark.parametrize("entry, word", [(e, word) for e in OVERLAYS for word in OVERLAYS[e]])
def test_overlays_keep_their_values(entry, word):
    config = compose(entry, word, "dry_run=true")
    length = config.max_completion_length
    values = (config.learning_rate, length) if entry == "train" else length
    assert values == OVERLAYS[entry][word]


def test_the_table_has_every_overlay_of_training_and_studies():
    files = {f"{group}={file.stem}" for group in ("experiment", "debug")
             for file in (CONF / group).glob("*.yaml")}  # fmt: skip
    assert files - {"experiment=theorems", "debug=prompts"} <= {
        *OVERLAYS["train"],
        *OVERLAYS["mse"],
    }


@pytest.mark.parametrize("group, names", [
    ("model", ("learning_rate", "lora_learning_rate")), ("dataset", ("max_completion_length",)),
])  # fmt: skip
def test_every_shipped_file_has_them(group, names):
    for file in (CONF / group).glob("*.yaml"):
        content = yaml.safe_load(file.read_text())
        assert "defaults" in content or all(content[name] > 0 for name in names), file


@pytest.mark.slow
def test_both_commands_start_from_the_same_policy():
    assert compose("mse").model == compose("train").model
    assert compose("mse", "experiment=monte_carlo_check").model.name == "tiny"


@pytest.mark.slow
def test_only_the_value_that_counts_is_of_the_name_of_a_run(tmp_path):
    config = compose("train")
    others = (
        replace(config, model=replace(config.model, learning_rate=1.0, lora_learning_rate=None)),
        replace(config, dataset=replace(config.dataset, max_completion_length=7)),
    )
    assert {folder_name(other) for other in others} == {folder_name(config)}
    cap, own = ("study.correction_cap=2",), ("study.parameters=mlp",)
    of_cap = [folder_name(compose("mse", *words)) for words in ((), cap, own)]
    assert of_cap[0] == of_cap[1] != of_cap[2]
    assert folder_name(compose("train", "learning_rate=2e-4")) != folder_name(config)


@pytest.mark.slow
def test_a_file_of_ones_own_may_leave_them_out(tmp_path):
    """As files from before did; then the command line has to say them."""
    for group, name in (("model", "tiny"), ("dataset", "arithmetic")):
        (tmp_path / group).mkdir()
        lines = (CONF / group / f"{name}.yaml").read_text().splitlines()
        kept = [x for x in lines if "learning_rate" not in x and "max_completion" not in x]
        (tmp_path / group / "mine.yaml").write_text("\n".join(kept))
    own = f"hydra.searchpath=[file://{tmp_path}]"
    with pytest.raises(ConfigError, match=r"^learning_rate=null"):
        compose_config("train", [own, "model=mine"])
    assert compose_config("train", [own, "model=mine", "learning_rate=1e-3"]).learning_rate == 1e-3
    with pytest.raises(ConfigError, match=r"^max_completion_length "):
        compose_config("mse", [own, "dataset=mine"])
    assert compose_config("mse", [own, "dataset=mine", "max_completion_length=9"])


@pytest.mark.slow
@pytest.mark.parametrize("entry, words", [
    pytest.param("train", (), marks=pytest.mark.slow), ("gap", ()),
    pytest.param("mse", ("-m", "seed=0,1"), marks=pytest.mark.slow),
    pytest.param("mse", ("experiment=best_group_size_start",), marks=pytest.mark.slow),
])  # fmt: skip
def test_outputs_go_below_their_root_and_are_the_same_runs(entry, words, tmp_path):
    usual = parse(entry, [*words, "dry_run=true"]).planned_runs
    moved = parse(entry, [*words, "dry_run=true", f"output_root={tmp_path}/a=1"]).planned_runs
    for one, other in zip(usual, moved, strict=True):
        below = one.folder.path.relative_to("outputs")
        assert other.folder.path == tmp_path / "a=1" / below
        assert other.folder.config_hash == one.folder.config_hash
        if one.sweep:
            assert other.sweep == tmp_path / "a=1" / one.sweep.relative_to("outputs")


@pytest.mark.slow
def test_reports_go_below_the_root_too(tmp_path):
    assert (
        parse("report", ["runs=x", f"output_root={tmp_path}"]).node.hydra.run.dir
        == f"{tmp_path}/report/all"
    )
