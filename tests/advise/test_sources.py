"""Advice from folders and files as commands leave them, and wrong command lines."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import yaml
from commands import compose, run
from folders import completed
from pyarrow import parquet

sys.path.insert(0, str(Path(__file__).parents[1] / "logs"))
from test_convert import WRITERS  # noqa: E402
from test_pairing import run_of_trl  # noqa: E402

from grpo_ustat.advise.__main__ import main
from grpo_ustat.advise.request import Request, parse_request
from grpo_ustat.advise.sources import advice_of
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.convert import convert
from grpo_ustat.logs.formats import FORMATS
from grpo_ustat.logs.rows import STEP_ROLLOUTS, Options
from grpo_ustat.runs.result import StudyResult

RESULT = {
    "scaling": {"c1": 1.0, "c2": 2.0, "c3": 9.0, "gstar": 4.0, "gstar_low": 3.5,
                "gstar_high": 4.6, "covariance": (1e-4 * np.eye(3)).tolist(), "dof": 99.0},
    "assumption2": {"corr": -0.5}, "noise": {"curve": [{"group_size": 4}]},
    "questions": 100, "pool_completions": 8, "summary": "Every reward is equal.",
}  # fmt: skip


def folder(path, verb, result=None, metrics=(), *overrides):
    """A run folder with what advice reads."""
    (path / ".hydra").mkdir(parents=True)
    config = asdict(compose(verb, *overrides))
    (path / ".hydra/config.yaml").write_text(yaml.safe_dump(config))
    if result is not None:
        (path / "result.json").write_text(json.dumps(completed(StudyResult, result)))
    if metrics:
        (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    return path


def test_a_study_says_keep_raise_or_lower(tmp_path):
    run_folder = folder(tmp_path / "run", "mse", RESULT)
    advice = advice_of(Request(run_folder, num_generations=16))
    assert advice.verdict == "lower" and advice.details[0].startswith(
        "The best G is about 4.0 [3.5"
    )
    assert "for new questions like these 100" in advice.details[-1]
    assert advice.next.endswith("budget.rollouts=256 group_size=4")
    assert advice_of(Request(run_folder / "result.json")).verdict == "choose"
    assert advice_of(Request(run_folder, rollouts=512)).next.endswith("rollouts=512 group_size=4")


def test_a_study_is_judged_at_the_rollouts_that_it_was_asked_about(tmp_path):
    """Where the size does not divide them, at a number near; a prime number has but itself."""
    run_folder = folder(tmp_path / "run", "mse", RESULT, (), "study.rollouts=100")
    assert "with n = 100 rollouts" in advice_of(Request(run_folder, num_generations=25)).sentence
    assert "with n = 128 rollouts" in advice_of(Request(run_folder, num_generations=32)).sentence
    assert "n = 100 rollouts then has 25 prompts" in advice_of(Request(run_folder)).sentence
    odd = advice_of(Request(run_folder, rollouts=97))
    assert (
        odd.sentence == "Use num_generations = 4: a step of n = 104 rollouts then has 26 prompts."
    )
    assert any("only num_generations = 97 divides n = 97." in line for line in odd.details)


def test_a_study_without_any_gradient_says_so(tmp_path):
    result = RESULT | {"assumption2": {"corr": None}}
    advice = advice_of(Request(folder(tmp_path / "run", "mse", result), num_generations=8))
    assert (advice.verdict, advice.sentence) == ("not enough data", "Every reward is equal.")


def monitored(step, c1, c3):
    return {"step": step, "monitor/c1": c1, "monitor/c2": 2.0, "monitor/c3": c3}


def test_a_training_run_is_judged_by_the_mean_constants_of_its_second_half(tmp_path):
    """C1 = 1 and C3 = 9 on average from step 10 on: G* = 4; before, C3 = 900."""
    steps = [monitored(step, 1.0, 900.0) for step in range(1, 10)]
    steps += [monitored(step, 1 + 0.1 * (-1) ** step, 9 + (-1) ** step) for step in range(10, 20)]
    run_folder = folder(tmp_path / "run", "train", None, steps, "group_size=16")
    advice = advice_of(Request(run_folder))
    assert advice.verdict == "lower" and "from 16 to 4" in advice.sentence
    assert "at 10 of the steps from 10 to 19" in advice.details[0]
    assert advice.numbers["rollouts"] == 256
    assert advice_of(Request(run_folder, num_generations=4)).verdict == "keep"


def test_the_loss_of_a_training_run_is_named_with_what_says_its_worth(tmp_path):
    steps = [monitored(step, 1 + 0.1 * (-1) ** step, 9 + (-1) ** step) for step in range(1, 20)]
    run_folder = folder(tmp_path / "run", "train", None, steps, "objective=trl_dapo")
    (run_folder / "checkpoint-8").mkdir()
    said = advice_of(Request(run_folder)).details[-1]
    assert said.startswith("This advice is for the unbiased leave-one-out gradient.")
    assert f"mse model={run_folder}/checkpoint-8" in said and said.endswith("objective=trl_dapo")
    plain = folder(tmp_path / "plain", "train", None, steps)
    assert "unbiased" not in " ".join(advice_of(Request(plain)).details)
    asked = advice_of(Request(plain, objective=("objective=grpo_original",))).details[-1]
    assert "objective=grpo_original" in asked
    words = ("objective=trl_dapo", "objective.entropy_coef=0.1")  # which mse refuses
    bonus = advice_of(Request(folder(tmp_path / "bonus", "train", None, steps, *words)))
    assert "objective" not in " ".join([*bonus.details, bonus.next])


LOSS = {
    "loss": "trl_dapo", "baseline": "group_std", "loss_type": "dapo", "rollouts": 256,
    "group_size": 8, "unbiased_direction": False,
    "efficiency_same_g": 0.9, "efficiency_same_g_low": 0.8, "efficiency_same_g_high": 1.0,
    "efficiency_best_g": 0.9, "efficiency_best_g_low": 0.8, "efficiency_best_g_high": 1.0,
    "direction": 0.98, "direction_low": 0.95, "direction_high": 1.0, "noise": 0.9,
    "noise_low": 0.8, "noise_high": 0.95, "best": True, "may_be_best": True,
}  # fmt: skip


def test_a_study_says_what_a_rollout_of_its_loss_is_worth(tmp_path):
    result = RESULT | {"losses": [LOSS]}
    run_folder = folder(tmp_path / "run", "mse", result, (), "objective=trl_dapo")
    advice = advice_of(Request(run_folder, num_generations=16))
    assert any("is 0.90 [0.80, 1.00] against the unbiased gradient" in x for x in advice.details)
    assert advice.next.endswith("objective=trl_dapo budget.rollouts=256 group_size=8")
    other = folder(tmp_path / "other", "mse", RESULT)
    asked = advice_of(Request(other, objective=("objective=trl_dapo",))).details[-2]
    assert "measures the best G for your loss: " in asked and f"pool={other}/pool" in asked


def test_a_training_run_without_monitor_says_what_to_measure(tmp_path):
    steps = [{"step": step, "frac_reward_zero_std": 0.25} for step in range(1, 13)]
    run_folder = folder(tmp_path / "run=1", "train", None, steps)
    for step in (8, 12):
        (run_folder / f"checkpoint-{step}").mkdir()
    advice = advice_of(Request(run_folder))
    assert advice.verdict == "not enough data"
    assert "In the last 10 steps, 25 % of the groups of 8" in advice.details[1]
    assert advice.next.split()[2] == f"model={run_folder}/checkpoint-12"
    untrained = advice_of(Request(folder(tmp_path / "run", "train", None, steps))).next
    assert untrained.endswith("# the initial model of the run, which has no checkpoint here")


def test_a_run_that_was_monitored_too_rarely_is_told_how_often_it_was(tmp_path):
    steps = [monitored(step, 1.0, 9.0) for step in (2, 4, 6, 8, 10)]
    advice = advice_of(Request(folder(tmp_path / "run", "train", None, steps)))
    assert advice.sentence.endswith("this run measured its gradient in too few steps.")
    assert advice.details[0].startswith(
        "The run measured its gradient at 5 steps. 3 of them are in the second half of training, "
        "where 4 are needed."
    )


def test_a_size_to_keep_is_not_followed_by_a_command_with_another_one(tmp_path):
    scaling = RESULT["scaling"] | {"covariance": np.diag([0.05, 0.01, 0.01]).tolist()}
    run_folder = folder(tmp_path / "run", "mse", RESULT | {"scaling": scaling})
    advice = advice_of(Request(run_folder, num_generations=5, rollouts=20))
    assert advice.verdict == "keep" and advice.next == "continue with num_generations=5"


def log(path, rows=24):
    table = {
        "step": [3] * rows,
        "prompt": [f"q{k // 8}" for k in range(rows)],
        "completion": [f"{k}" for k in range(rows)],
        "accuracy_reward": [float(k % 3 == 0) for k in range(rows)],
        "advantage": [0.0] * rows,
    }
    parquet.write_table(pyarrow.table(table), path)
    return path


@pytest.mark.slow
def test_rewards_alone_say_what_they_cannot_tell(tmp_path):
    path = log(tmp_path / "completions_00003.parquet")
    advice = advice_of(Request(path, num_generations=4))
    assert advice.verdict == "not enough data"
    assert advice.sentence.startswith("Rewards alone do not show whether num_generations = 4 is")
    assert "rewards are from accuracy_reward" in advice.details[0] and "C1" in advice.details[-1]
    assert "num_generations=4 model=CHECKPOINT study.cut_at=LENGTH" in advice.next
    newest = advice_of(Request(tmp_path))
    assert newest.details[0].startswith(
        "This advice is from completions_00003.parquet, the last log in"
    )


@pytest.fixture
def words(tmp_path, monkeypatch):
    """What is typed of a study, which is done at once, in a folder of its own."""
    typed = []

    def mse(command, **_):
        typed.extend(command)
        target = dict(word.partition("=")[::2] for word in command)["hydra.run.dir"]
        folder(tmp_path / target, "mse", RESULT)
        return type("Ended", (), {"returncode": 0})

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("subprocess.run", mse)
    return typed


def test_a_log_is_scored_by_the_model_that_wrote_it(tmp_path, words):
    """The study runs as a command of its own, and a checkpoint of another step is warned of."""
    path = log(tmp_path / "completions_00003.parquet")
    line = (str(path), "num_generations=16", "model=out/checkpoint-3", "study.cut_at=96",
            "objective=trl_dapo", "baseline=group_mean")  # fmt: skip
    advice = advice_of(parse_request(line))
    assert advice.verdict == "lower"
    assert set(line[2:]) <= set(words)
    assert "written 1 update before the model whose gradients" in advice.details[0]


@pytest.mark.parametrize(
    "size, model_size, n",
    [(None, None, 24), (8, None, 24), (16, None, 16), (None, 128, 128), (4, 128, 128)],
)
@pytest.mark.usefixtures("words")
def test_the_step_of_a_log_is_that_of_those_who_wrote_it(tmp_path, size, model_size, n):
    """24 rollouts, in whole groups, and not 256; what is typed is taken first."""
    path = log(tmp_path / "completions_00003.parquet")
    advice = advice_of(Request(path, size, model_size, model="checkpoint-2"))
    assert advice.numbers["rollouts"] == n
    told = f"n = {n} is the number of rollouts per step of the training run that wrote {path}."
    assert (told in advice.details) == (model_size is None)


def test_the_study_of_a_converted_file_has_the_step_that_stands_in_it(tmp_path):
    path = tmp_path / "rollouts.parquet"
    table = pyarrow.table({"prompt_id": ["a"], "reward": [1.0]})
    parquet.write_table(table.replace_schema_metadata({STEP_ROLLOUTS: "512"}), path)
    run_folder = folder(tmp_path / "run", "mse", RESULT, (), f"pool={path}")
    assert advice_of(Request(run_folder)).numbers["rollouts"] == 512
    assert advice_of(Request(run_folder, 3)).numbers["rollouts"] == 510
    path.unlink()
    assert advice_of(Request(run_folder)).numbers["rollouts"] == 256


@pytest.mark.parametrize(
    "files, checkpoints, chosen, model, said",
    [
        ((38, 39, 40), (20, 40), 40, "checkpoint-40",
         "# the nearest checkpoint; these completions (of at most LENGTH tokens) were written 1 "
         "update before"),
        ((20, 21, 22, 23), (20,), 21, "checkpoint-20", "# the model that wrote these completions"),
        ((40, 41), (20, 40), 41, "checkpoint-40", "# the model that wrote these completions"),
        ((9, 10), (), 10, "CHECKPOINT", "of at most LENGTH tokens); it had received 9 updates"),
    ],
)  # fmt: skip
def test_a_folder_of_trl_names_the_file_and_the_checkpoint_that_convert_names(
    tmp_path, monkeypatch, files, checkpoints, chosen, model, said
):
    monkeypatch.chdir(tmp_path)
    run_of_trl(tmp_path / "run", files, checkpoints, 1, 20)
    advice = advice_of(Request(Path("run")))
    assert advice.details[0].startswith(f"This advice is from completions_{chosen:05d}.parquet, ")
    of_checkpoint = f"run/{model}" if checkpoints else model
    assert advice.next.startswith(
        f"grpo-ustat advise run/completions/completions_{chosen:05d}.parquet model={of_checkpoint} "
    )
    assert said in advice.next
    told = [x for x in advice.details if x.startswith(f"completions_{chosen:05d} was written")]
    assert bool(told) == ("nearest" in said)
    pairing = convert(Path("run"), FORMATS["trl"], tmp_path / "out.parquet", Options()).pairing
    if pairing is not None:
        assert (pairing.file, str(pairing.checkpoint)) == (
            f"completions_{chosen:05d}", of_checkpoint,
        )  # fmt: skip


@pytest.mark.usefixtures("words")
def test_of_a_folder_the_file_is_taken_that_the_typed_model_wrote(tmp_path):
    run_of_trl(tmp_path / "run", range(20, 25), (), 1, 20)
    advice = advice_of(Request(tmp_path / "run", model="elsewhere/checkpoint-21"))
    assert advice.details[0].startswith(
        "This advice is from completions_00022.parquet, the log nearest"
    )
    assert not any("WARNING" in line for line in advice.details)


def test_of_a_part_of_a_run_the_run_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder(tmp_path / "run", "train")
    run_of_trl(tmp_path / "trl", (6,), (5,), 1, 5)
    (tmp_path / "run/checkpoint-20").mkdir()
    for place in ("run/checkpoint-20", "trl/checkpoint-5"):
        with pytest.raises(ConfigError) as refused:
            advice_of(Request(Path(place)))
        run_of_it = place.partition("/")[0]
        assert str(refused.value) == f"{place} is part of a run: name the run folder, {run_of_it}"


VERL = {"input": "q", "output": "a", "score": 1.0, "step": 3}


@pytest.mark.parametrize("place", ["folder", "file"])
@pytest.mark.parametrize("name", WRITERS)
def test_rollouts_of_every_framework_are_converted_first(tmp_path, name, place):
    """Ten rewards of two prompts with mean .35, and the lines of the conversion."""
    if name == "slime":
        pytest.importorskip("torch")
    WRITERS[name](tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*.*") if path.is_file()]
    source = tmp_path / "run" if place == "folder" or len(files) > 1 else files[0]
    advice = advice_of(Request(source, num_generations=4))
    text = " ".join(advice.details)
    assert "2 prompts with 5 completions each" in text and "The mean reward is 0.35 " in text
    if name != "trl":
        assert advice.details[0].startswith(f"{name}: 10 of 10 rows in ")
    assert advice.next.startswith(f"grpo-ustat advise {source}") or name == "trl"


def test_a_pickle_and_a_folder_of_hydra_are_read(tmp_path):
    (tmp_path / "verl/.hydra").mkdir(parents=True)
    (tmp_path / "verl/.hydra/config.yaml").write_text("trainer: {project_name: x}\n")
    rows = [VERL | {"input": f"q{k // 4}", "score": k % 3 % 2} for k in range(8)]
    (tmp_path / "verl/3.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert advice_of(Request(tmp_path / "verl")).details[0].startswith("verl: 8 of 8 rows")
    renamed = tmp_path / "dump.txt"
    renamed.write_bytes((tmp_path / "verl/3.jsonl").read_bytes())
    advice = advice_of(Request(renamed))
    assert advice.details[0].startswith("verl: 8 of 8 rows") and str(renamed) in advice.next


def test_rollouts_are_converted_to_a_file_that_the_model_scores(tmp_path, words):
    WRITERS["verl"](tmp_path / "run")
    request = Request(tmp_path / "run", 4, model="global_step_2", output_root=str(tmp_path))
    advice = advice_of(request)
    (pool,) = (word.partition("=")[2] for word in words if word.startswith("pool="))
    assert Path(pool).parent == tmp_path / "advise" and pool.endswith(".parquet")
    assert f"The rollouts are in {pool}." in advice.details


def test_logs_of_several_runs_of_trl_are_converted(tmp_path):
    for name, rows in (("a", 24), ("b", 16)):
        (tmp_path / f"runs/{name}/completions").mkdir(parents=True)
        log(tmp_path / f"runs/{name}/completions/completions_00003.parquet", rows)
    details = advice_of(Request(tmp_path / "runs")).details
    assert details[0].startswith("trl: ") and "left out" in details[1]


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "no source: name a run folder, a pool or a log, e.g. grpo-ustat advise"),
        (["a", "a"], "a is named twice"),
        (
            ["a", "b", "model=c"],
            "model=c can compute the gradients of only one log, but 2 logs are named",
        ),
        (
            ["a", "num_generations=x"],
            "num_generations=x: the value must be a whole number of at least 2",
        ),
        (
            ["a", "num_generations=1"],
            "num_generations=1: the value must be a whole number of at least 2",
        ),
        (["a", "num_generation=8"], "unknown num_generation=8: did you mean num_generations?"),
        (
            ["a", "study.cut_at=96"],
            "study.cut_at=96 has an effect only if a model computes the gradients of a log",
        ),
    ],
)
def test_wrong_command_lines_are_refused_in_a_line(words, message):
    with pytest.raises(ConfigError) as refused:
        parse_request(words)
    assert message in str(refused.value)


def test_group_size_is_an_alias_and_paths_may_hold_equals_signs(tmp_path):
    request = parse_request([f"{tmp_path}/G-8/seed-0", "group_size=8", "rollouts=64"])
    assert (request.num_generations, request.rollouts) == (8, 64)
    assert str(request.source) == f"{tmp_path}/G-8/seed-0"


def test_places_without_advice_are_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist: name a run folder"):
        advice_of(Request(tmp_path / "missing"))
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=r"notes.txt is empty"):
        advice_of(Request(tmp_path / "notes.txt"))
    (tmp_path / "3.jsonl.gz").write_bytes(b"\x1f\x8bpacked")
    with pytest.raises(ConfigError, match="3.jsonl.gz is compressed: unpack it first"):
        advice_of(Request(tmp_path / "3.jsonl.gz"))
    with pytest.raises(ConfigError, match="has no files that can be read: name a run folder"):
        advice_of(Request(tmp_path))
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied/code.json").write_text("{}")
    with pytest.raises(ConfigError, match="copied is a run folder without .*: copy it with"):
        advice_of(Request(tmp_path / "copied"))
    folder(tmp_path / "sweep/a", "mse")
    with pytest.raises(ConfigError, match=r"contains 1 runs: name one, e.g. .*/sweep/a"):
        advice_of(Request(tmp_path / "sweep"))
    with pytest.raises(ConfigError, match="is not finished"):
        advice_of(Request(tmp_path / "sweep/a"))
    with pytest.raises(ConfigError, match="8 does not divide rollouts=100: use rollouts=96 or"):
        advice_of(Request(folder(tmp_path / "c", "mse", RESULT), 8, 100))
    with pytest.raises(ConfigError, match="num_generations=512 is larger than rollouts=256"):
        advice_of(Request(folder(tmp_path / "b", "mse", RESULT), 512, 256))


def test_the_command_answers_first_and_then_what_to_type(tmp_path, monkeypatch, capsys):
    run_folder = folder(tmp_path / "run", "mse", RESULT)
    monkeypatch.setattr(sys, "argv", ["advise", str(run_folder), "num_generations=16"])
    main()
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("Lower num_generations from 16 to 4: ")
    assert out[-1].startswith("next: grpo-ustat train ") and max(map(len, out[:-1])) <= 100
    assert not any(line.startswith("%") for line in out)
    monkeypatch.setattr(sys, "argv", ["advise", str(run_folder), "--json"])
    main()
    assert json.loads(capsys.readouterr().out)["verdict"] == "choose"
    monkeypatch.setattr(sys, "argv", ["advise", str(tmp_path / "no")])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.nightly(minutes=1.4)
def test_a_pool_alone_is_studied_without_sampling_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pool = tmp_path / "pools/one"
    study = ("debug=mse", "model=tiny", "study.questions=6", "budget.pool_completions=8")
    code, _, err = run(
        "mse", *study, f"pool={pool}", f"hydra.run.dir={tmp_path}/first", cwd=tmp_path
    )
    assert code == 0, err
    before = {path: path.stat().st_mtime_ns for path in pool.iterdir()}
    advice = advice_of(Request(pool, num_generations=64))
    assert advice.verdict in ("lower", "keep", "not enough data")
    assert {path: path.stat().st_mtime_ns for path in pool.iterdir()} == before
    first = json.loads((tmp_path / "first/result.json").read_text())
    assert advice.numbers["gstar"] == first["scaling"]["gstar"]


def test_a_run_whose_configuration_is_damaged_is_one_line(tmp_path):
    run_folder = folder(tmp_path / "run", "mse", RESULT)
    (run_folder / ".hydra/config.yaml").write_text("seed: -1\nmodel: [")
    with pytest.raises(ConfigError, match="config.yaml is damaged"):
        advice_of(Request(run_folder))
