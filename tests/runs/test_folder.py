"""An output folder of a refused run is removed again."""

from __future__ import annotations

from pathlib import Path

from grpo_ustat.runs.folder import remove_empty


def test_empty_folders_go_up_to_where_a_file_or_the_working_directory_is(tmp_path, monkeypatch):
    (tmp_path / "here/outputs/train/a/seed=0").mkdir(parents=True)
    (tmp_path / "other/a/b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    remove_empty(Path("outputs/train/a/seed=0"))
    assert list((tmp_path / "here").iterdir()) == []
    remove_empty(tmp_path / "other/a/b")  # elsewhere no further than the folder above it
    assert list((tmp_path / "other").iterdir()) == []
    (tmp_path / "here/outputs/train/a").mkdir(parents=True)
    (tmp_path / "here/outputs/README.md").touch()
    remove_empty(Path("outputs/train/a"))
    assert [file.name for file in (tmp_path / "here/outputs").iterdir()] == ["README.md"]
