"""The run folder: removed when empty, its versions kept, overwritten as a whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import compose
from folders import completed

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.runs.folder import RunFolder, remove_empty
from grpo_ustat.runs.log import MetricsLog
from grpo_ustat.runs.result import StudyResult


def test_empty_folders_go_up_to_where_a_file_or_the_working_directory_is(tmp_path, monkeypatch):
    (tmp_path / "here/outputs/train/a/seed-0").mkdir(parents=True)
    (tmp_path / "other/a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    remove_empty(Path("outputs/train/a/seed-0"))
    assert list((tmp_path / "here").iterdir()) == []
    remove_empty(tmp_path / "other/a/b")  # elsewhere no further than the folder above it
    assert list((tmp_path / "other").iterdir()) == []
    (tmp_path / "here/run").mkdir()
    remove_empty(Path("run"))  # the working directory stays, empty as it is
    assert list((tmp_path / "here").iterdir()) == []
    (tmp_path / "here/outputs/train/a").mkdir(parents=True)
    (tmp_path / "here/outputs/README.md").touch()
    remove_empty(Path("outputs/train/a"))
    assert [file.name for file in (tmp_path / "here/outputs").iterdir()] == ["README.md"]


def finished_run(path):
    """A run folder with a table and a result."""
    folder = RunFolder(path, compose("mse", "debug=mse"))
    folder.open()
    (path / "curves.csv").write_text("mse\n1.5\n")
    result = {"curves": [{"mse": 1.5}], "summary": "as it was"}
    folder.finish(completed(StudyResult, result))
    return folder


def test_earlier_versions_are_named_and_kept(tmp_path, capsys):
    config = compose("mse", "debug=mse")
    RunFolder(tmp_path, config).open()
    code = json.loads((tmp_path / "code.json").read_text())
    now, code["versions"]["torch"] = code["versions"]["torch"], "1.0"
    (tmp_path / "code.json").write_text(json.dumps(code))
    capsys.readouterr()
    RunFolder(tmp_path, config).open()
    assert f"torch 1.0, now {now}" in capsys.readouterr().err
    folder = RunFolder(tmp_path, config)  # a third launch changes nothing more
    folder.open()
    assert "torch" not in capsys.readouterr().err
    folder.finish(completed(StudyResult))
    (earlier,) = folder.read_result()["earlier_versions"]
    assert earlier["torch"] == "1.0"


def begun_run(path, *overrides):
    """A run folder with a pool, a table and a result, and the same run again."""
    folder = finished_run(path)
    (path / "pool").mkdir()
    (path / "pool/part.safetensors").write_text("paid for")
    return folder, RunFolder(path, compose("mse", "debug=mse", "on_existing=overwrite"))


@pytest.mark.parametrize("name", ["pool", ".hydra", "curves.csv"])
def test_overwriting_removes_a_link_and_not_what_it_leads_to(tmp_path, name):
    folder, again = begun_run(tmp_path / "run")
    (tmp_path / "run" / name).rename(tmp_path / "kept")
    (tmp_path / "run" / name).symlink_to(tmp_path / "kept")
    again.open()
    assert (tmp_path / "kept").exists() and not (tmp_path / "run" / name).is_symlink()
    if name == "pool":
        assert (tmp_path / "kept/part.safetensors").read_text() == "paid for"


def test_a_run_folder_that_is_a_link_is_overwritten_where_it_leads(tmp_path):
    folder, _ = begun_run(tmp_path / "far/run")
    (tmp_path / "outputs").symlink_to(tmp_path / "far")
    (tmp_path / "linked").symlink_to(tmp_path / "far/run")
    for place in (tmp_path / "outputs/run", tmp_path / "linked"):
        RunFolder(place, compose("mse", "debug=mse", "on_existing=overwrite")).open()
        assert (tmp_path / "linked").is_symlink() and (tmp_path / "outputs").is_symlink()
        assert not (tmp_path / "far/run/result.json").exists()
        finished_run(place)


@pytest.mark.parametrize("removals", [1, 2, 3])
def test_a_kill_while_overwriting_leaves_no_result_and_the_same_command_goes_on(
    tmp_path, monkeypatch, removals
):
    monkeypatch.setattr("grpo_ustat.runs.folder.code_state", lambda: {"versions": {}})
    _, again = begun_run(tmp_path)
    left = iter(range(removals))

    def killed(self, *arguments, _remove=Path.unlink):
        if next(left, None) is None:
            raise KeyboardInterrupt
        _remove(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", killed)
        again.open()
    assert not (tmp_path / "result.json").exists() and (tmp_path / "code.json").exists()
    again.open()
    assert not (tmp_path / "pool").exists() and not (tmp_path / "curves.csv").exists()


@pytest.mark.parametrize(
    "name, content",
    [
        ("result.json", '{"summary": "of an older version"}'),
        ("result.json", "[" * 100_000),
        ("code.json", "[3]"),
        (".hydra/config.yaml", "a: ["),
    ],
)
def test_a_damaged_file_is_named_in_one_line(tmp_path, name, content):
    folder = finished_run(tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    with pytest.raises(ConfigError, match=f"{name} is missing, damaged or of an older version"):
        folder.result()


def test_rows_of_no_step_are_written_again(tmp_path, capsys):
    rows = ['{"step": 1}', '{"step": "x"}', "[" * 100_000, '{"step": 2}', '{"step": null}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    MetricsLog(tmp_path, keep_up_to=2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
