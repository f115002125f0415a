"""Values of overrides that hold `=`, as folders of one's own may, without quotes."""

from __future__ import annotations

import itertools
import shutil

import pytest
from commands import run
from slow_cases import slow_after

from grpo_ustat import __version__
from grpo_ustat.cli.compose import compose_config, parse
from grpo_ustat.cli.hydra_api import model_place, parse_arguments, quote_plain, split_sweep
from grpo_ustat.config.identity import folder_name
from grpo_ustat.config.model import ASSETS
from grpo_ustat.config.schema import ConfigError

FOLDER = "outputs/train/G=8-lr=1e-6/seed=0/checkpoint-40"
SAME = [
    "seed=0", "group_size=4,8,16", "model=hub", "pool=null", "steps=[1,2]", "prompt=bare,plain",
    "pool='a=1'", 'pool="a=1"', "pool='a=1','b=2'", "pool='it\\'s=1'", "runs=['a=1',\"b=2\"]",
    "temperature=range(start=1,stop=3)", "temperature=choice(1,2)", "seed=sort(3,2,reverse=true)",
    "hydra.run.dir=${oc.env:HOME,x=1}", "hydra.run.dir=outputs/${folder_name:}/x",
    "+baseline_options.median={epsilon:1e-6}", "+x={a:'b=1'}", "~x", "x=", "-m",
    "pool=[a,b]", "+x=[[1,2],[3]]", "pool=a'b=1",
]  # fmt: skip
QUOTED = {
    f"pool={FOLDER}": f"pool='{FOLDER}'",
    "+x=a=b=c": "+x='a=b=c'",
    "++model.model_name_or_path=a=1": "++model.model_name_or_path='a=1'",
    "pool=a=1,b=2": "pool='a=1','b=2'",
    "pool=a=1,b": "pool='a=1',b",
    "pool=a=1, b=2": "pool='a=1', 'b=2'",
    "runs=[a=1,b]": "runs=['a=1',b]",
    "runs=[a=1],[b=2]": "runs=['a=1'],['b=2']",
    "runs=[[a=1],b]": "runs=[['a=1'],b]",
    "hydra.run.dir=${a}/b=1": "hydra.run.dir='${a}/b=1'",
    "hydra.run.dir=${oc.env:HOME,x=1}/b=1": "hydra.run.dir='${oc.env:HOME,x=1}/b=1'",
    "pool=a b=1": "pool='a b=1'",
}  # fmt: skip


@pytest.mark.parametrize("override", SAME)
def test_what_hydra_reads_stays_as_it_is(override):
    assert quote_plain(override) == override


@pytest.mark.parametrize("override, quoted", QUOTED.items())
def test_a_value_with_a_further_equals_sign_is_quoted_once(override, quoted):
    assert quote_plain(override) == quoted
    assert quote_plain(quoted) == quoted


VALUES = ["a=1", "b=2/c=3", "plain", "x y=1", "a==b", "1e-6=x", "a.b=c:d", "~=~"]


@pytest.mark.parametrize("values", list(itertools.permutations(VALUES, 2)))
def test_a_sweep_gives_back_the_values_that_it_was_given(values):
    """By Hydra's own parser."""
    runs = split_sweep([quote_plain(f"pool={','.join(values)}"), "seed=0"])
    assert [run[0].partition("=")[2].strip("'") for run in runs] == list(values)


def test_a_flags_value_is_not_an_override(tmp_path):
    (folder := tmp_path / "a=1").mkdir()
    words = parse_arguments(["--config-dir", str(folder), "pool=a=1"])
    assert (words.config_dir, words.overrides[0]) == (str(folder), "pool='a=1'")


def test_the_version_is_ours_and_hydras(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse_arguments(["--version"])
    assert capsys.readouterr().out.startswith(f"grpo-ustat {__version__}, Hydra 1.")


@pytest.mark.slow(minutes=0.02)
def test_a_path_with_equals_signs_reaches_the_configuration():
    assert compose_config("mse", [f"pool={FOLDER}"]).pool == FOLDER
    with pytest.raises(ConfigError, match=f"model_name_or_path={FOLDER} is neither a folder nor"):
        compose_config("mse", ["model=hub", f"model.model_name_or_path={FOLDER}"])


@pytest.fixture
def model_folder(tmp_path, monkeypatch):
    """A folder of a model, `=` in its path, below the working directory."""
    shutil.copytree(ASSETS / "tiny", tmp_path / "G=8/seed=0")
    monkeypatch.chdir(tmp_path)
    return "G=8/seed=0"


NAMES = ["model=tiny", "model=hub", "model=tiny,org/name", "model=typo", "model=", "model.name=a/b",
         "+model=org/name", "dataset=org/name", "model=choice(tiny,org/name)"]  # fmt: skip


@pytest.mark.parametrize("override", NAMES)
def test_a_name_of_a_file_stays_as_it_is(override):
    assert model_place(override) == [override]


@pytest.mark.parametrize(
    "typed", slow_after(1, ["G=8/seed=0", "./G=8/seed=0", "G=8/../G=8/seed=0/", "'G=8/seed=0'"])
)
def test_a_model_is_chosen_by_its_folder(typed, model_folder):
    as_before = ["model=hub", f"model.model_name_or_path={model_folder}"]
    assert compose_config("mse", [f"model={typed}"]) == compose_config("mse", as_before)


def test_a_model_is_chosen_by_its_name_on_the_hub():
    as_before = compose_config("train", ["model=hub", "model.model_name_or_path=org/name"])
    config = compose_config("train", ["model=org/name"])
    assert config == as_before and folder_name(config) == folder_name(as_before)
    assert folder_name(config).startswith("org_name-arithmetic-")


def test_a_file_of_that_name_goes_before_a_folder(tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "conf/model/mine").mkdir(parents=True)
    (tmp_path / "conf/model/mine/one.yaml").touch()
    monkeypatch.chdir(tmp_path)
    assert model_place("model=tiny") == ["model=tiny"]
    assert model_place("model=own") == ["model=hub", "model.model_name_or_path='own'"]
    assert model_place("model=mine/one", "conf") == ["model=mine/one"]


@pytest.mark.slow
def test_a_sweep_over_models_has_a_run_for_each(model_folder):
    runs = parse("train", ["-m", f"model=tiny,org/name,{model_folder}"]).planned_runs
    places = [run.config.model.model_name_or_path for run in runs]
    assert places == ["embedded:tiny", "org/name", model_folder]
    assert [run.name for run in runs][1] == "model=org/name"


@pytest.mark.slow
@pytest.mark.parametrize("folder, message", [
    ("./nowhere", "model_name_or_path=./nowhere: there is no folder /"),
    ("~/a/nowhere", "model_name_or_path=~/a/nowhere: there is no folder /"),
    ("a/b/c", "model_name_or_path=a/b/c is neither a folder nor org/name"),
    ("G=8", "model_name_or_path=G=8 contains no model: no config.json in /"),
])  # fmt: skip
def test_a_place_without_a_model_is_refused(folder, message, model_folder):
    with pytest.raises(ConfigError, match=message):
        parse("train", [f"model={folder}"])


@pytest.mark.parametrize("key", ["model", "study.scored_by"])
def test_of_a_run_in_place_of_a_model_the_newest_checkpoint_is_named(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    for step, file in ((8, "config.json"), (20, "adapter_config.json"), (30, "optimizer.pt")):
        (tmp_path / f"run/checkpoint-{step}").mkdir(parents=True)
        (tmp_path / f"run/checkpoint-{step}" / file).write_text("{}")
    with pytest.raises(ConfigError, match="contains no model: no config.json in /") as refused:
        parse("mse", [f"{key}=run"])
    assert str(refused.value).endswith(f"; its newest checkpoint is {key}=run/checkpoint-20")


@pytest.mark.parametrize("path", ["../x", "./x", "/data/" + "a" * 250 + "/x"])
def test_the_folder_of_a_run_is_neither_hidden_nor_too_long(path, model_folder, monkeypatch):
    monkeypatch.setattr("grpo_ustat.config.model.check_model", lambda *_, **__: None)
    name = folder_name(compose_config("train", ["model=hub", f"model.model_name_or_path={path}"]))
    assert name[0] not in "._" and "x-arithmetic-" in name and len(name) < 220


@pytest.fixture
def two_checkpoints(tmp_path):
    """Checkpoints in a folder of one's own, `=` in its name."""
    for name in ("checkpoint-1", "checkpoint-2"):
        shutil.copytree(ASSETS / "tiny", tmp_path / "G=8/seed=0" / name)
    return "G=8/seed=0/checkpoint-1,G=8/seed=0/checkpoint-2"


SMALL = (
    "study.questions=4", "budget.pool_completions=8", "group_sizes=[2,4]", "launch.workers=1",
    "max_completion_length=8",
)  # fmt: skip


@pytest.mark.slow
def test_a_sweep_over_such_paths_has_a_run_for_each(tmp_path, monkeypatch, two_checkpoints):
    monkeypatch.chdir(tmp_path)
    words = ["-m", "model=hub", f"model.model_name_or_path={two_checkpoints}", "pool=a=1"]
    runs = [run.config for run in parse("mse", words).planned_runs]
    assert ",".join(run.model.model_name_or_path for run in runs) == two_checkpoints
    assert {run.pool for run in runs} == {"a=1"}


@pytest.mark.slow
def test_a_study_and_a_sweep_of_such_folders_run(tmp_path, two_checkpoints):
    code, _, told = run("mse", *SMALL, "pool=p/a=1", "hydra.run.dir=out/x=1/seed=0", cwd=tmp_path)
    assert code == 0, told
    assert (tmp_path / "out/x=1/seed=0/result.json").is_file()
    assert (tmp_path / "p/a=1/pool.json").is_file()
    models = ("model=hub", f"model.model_name_or_path={two_checkpoints}")
    code, _, told = run("mse", "-m", *SMALL, *models, cwd=tmp_path)
    assert code == 0, told
    assert len(list(tmp_path.glob("outputs/mse/*/seed-0/result.json"))) == 2
    code, _, told = run("report", "runs=out/x=1", "hydra.run.dir=r=1/a=2", cwd=tmp_path)
    assert code == 0 and (tmp_path / "r=1/a=2/report.html").is_file(), told
