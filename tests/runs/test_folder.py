"""The run folder: removed when empty, its files known by checksums, its versions kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import compose
from folders import completed

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.runs.contents import content_digest
from grpo_ustat.runs.folder import RunFolder, changed_files, remove_empty
from grpo_ustat.runs.log import MetricsLog
from grpo_ustat.runs.record import RunRecord
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


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("result.json", "1.5", "1.4"),
        ("result.json", "as it was", "better"),
        ("curves.csv", "5", "4"),
    ],
)
def test_an_edited_number_is_found_by_its_checksum(tmp_path, capsys, name, old, new):
    folder, file = finished_run(tmp_path / "run"), tmp_path / "run" / name
    assert changed_files(folder.path, folder.read_result()) == []
    file.write_text(file.read_text().replace(old, new, 1))
    remedy = (
        f"{name} was changed after the run: restore it, or delete .*result.json and run the same"
    )
    with pytest.raises(ConfigError, match=remedy):
        folder.read_result()


def test_other_spaces_or_a_table_that_was_removed_change_no_result(tmp_path):
    folder = finished_run(tmp_path / "run")
    file = tmp_path / "run/result.json"
    file.write_text(json.dumps(json.loads(file.read_text())))
    (tmp_path / "run/curves.csv").unlink()
    assert folder.read_result()["summary"] == "as it was"


def test_a_result_of_before_has_no_checksums_and_is_read(tmp_path):
    folder = finished_run(tmp_path / "run")
    file = tmp_path / "run/result.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in content.items() if k not in ("digest", "files")}))
    assert folder.read_result()["summary"] == "as it was"


def test_earlier_versions_are_named_and_kept(tmp_path, capsys):
    config = compose("mse", "debug=mse")
    RunFolder(tmp_path, config).open()
    code = json.loads((tmp_path / "code.json").read_text())
    now, code["versions"]["torch"] = code["versions"]["torch"], "1.0"
    code["digest"] = content_digest(code)
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


@pytest.mark.parametrize("key", ["versions", "weights", "digest"])
def test_a_changed_letter_of_what_a_run_was_made_with_is_named(tmp_path, key):
    """It was taken for an earlier version: 'acc%lerate 1.15.0, now None'."""
    config = compose("mse", "debug=mse")
    RunFolder(tmp_path, config).open()
    file = tmp_path / "code.json"
    old, new = {
        "versions": ("accelerate", "acc%lerate"),
        "weights": ('"weights": ', '"weight": '),
        "digest": ('"digest": "', '"digest": "0'),
    }[key]
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=r"code\.json.* on_existing=overwrite"):
        RunFolder(tmp_path, config).open()
    record = RunRecord(tmp_path)
    assert not record.code and "code.json" in record.notes[0]


def test_a_run_that_goes_on_past_its_result_may_change_its_tables(tmp_path, capsys):
    """As training to a larger max_steps does, which may be killed before it has another result."""
    path = finished_run(tmp_path / "run").path
    folder = RunFolder(path, compose("mse", "debug=mse"))
    folder.open()
    (path / "curves.csv").write_text("mse\n1.5\n1.2\n")
    result = folder.read_result()
    assert result["summary"] == "as it was"
    (path / "result.json").write_text((path / "result.json").read_text().replace("1.5", "1.4"))
    with pytest.raises(ConfigError, match="result.json"):
        folder.read_result()


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
    "name, content, wrong",
    [
        ("result.json", '{"cost": {"tokens": "x"}}', "cost.tokens is 'x', not a whole number"),
        ("result.json", '{"curves": [{"mse": NaN}]}', "it contains NaN, which no run writes"),
        ("result.json", "[" * 100_000, "it is nested more than 40 deep"),
        ("code.json", '{"versions": 3}', "versions is 3, not a mapping"),
    ],
)
def test_a_run_that_goes_on_reads_its_folder_with_limits(tmp_path, name, content, wrong):
    folder = finished_run(tmp_path / "run")
    (tmp_path / "run" / name).write_text(content)
    with pytest.raises(ConfigError, match=name) as refusal:
        folder.result()
    assert wrong in str(refusal.value)


def test_rows_of_no_step_are_written_again(tmp_path, capsys):
    rows = ['{"step": 1}', '{"step": "x"}', "[" * 100_000, '{"step": 2}', '{"step": null}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    MetricsLog(tmp_path, keep_up_to=2)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
