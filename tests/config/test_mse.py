"""What a study refuses before it starts: folders for a pool that hold something else."""

from __future__ import annotations

import pytest
from commands import compose, run
from golden import naming

from grpo_ustat.config.mse import check_pool_folder
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.mse.result import precision, tf32_text
from grpo_ustat.runs.study_parts import Precision


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own").mkdir()
    for name in ("letter.txt", "photo.png"):
        (tmp_path / "own" / name).write_text("mine")
    return tmp_path / "own"


@pytest.mark.slow
def test_a_folder_of_somebodys_own_files_is_refused_before_any_work(own):
    before = sorted(own.rglob("*"))
    words = ("pool=own", "debug=mse")
    code, out, told = run("mse", *words, cwd=own.parent)
    assert (code, out) == (2, "")
    assert told.startswith("error: pool=own ") and told.count("\n") == 1
    assert "letter.txt" in told and "pool=own/pool" in told
    assert sorted(own.rglob("*")) == before and list(own.parent.iterdir()) == [own]


def test_error_of_tf32_in_result_and_text():
    cpu, cuda = compose("mse"), compose("mse", "launch.device=cuda")
    assert precision(cpu) == Precision(weights="float32", tf32=False, tf32_error=None)
    assert precision(cuda).tf32_error == {"norm": 1e-3, "sum_of_norms": 6e-4}
    assert tf32_text(cpu) == ""
    assert "0.1 %" in tf32_text(cuda) and "0.06 %" in tf32_text(cuda)


def test_one_file_is_enough_and_a_hidden_one_too(tmp_path):
    (tmp_path / ".git").mkdir()
    with pytest.raises(ConfigError, match=naming(".git", "pool.json")):
        check_pool_folder(str(tmp_path))


def test_a_run_folder_leads_to_the_pool_in_it(own):
    (own / "pool").mkdir()
    (own / "pool/pool.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"pool={own}/pool"):
        check_pool_folder(str(own))


def test_a_file_is_no_folder(own):
    with pytest.raises(ConfigError, match="letter.txt"):
        check_pool_folder(str(own / "letter.txt"))


def test_new_empty_and_begun_folders_and_pools_are_taken(own):
    check_pool_folder(str(own / "new"))
    (own / "new").mkdir()
    check_pool_folder(str(own / "new"))
    (own / "new/.pool.json.0123abcd.tmp").write_text("{")  # of a study that was killed
    check_pool_folder(str(own / "new"))
    (own / "pool.json").write_text("{}")
    check_pool_folder(str(own))
