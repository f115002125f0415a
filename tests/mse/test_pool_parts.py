"""A pool filled in parts, by jobs that may run at once, is the pool of one job."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from grpo_ustat.config.identity import folder_name
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.distributed.workers import WorkCost
from grpo_ustat.mse import pool as pool_module
from grpo_ustat.mse import study as study_run
from grpo_ustat.mse.pool import _chunks_to_sample, build_part, build_pool
from grpo_ustat.mse.pool_store import draws_of, reuse_pool
from grpo_ustat.policy.configured import configured_task
from grpo_ustat.records import Prompt
from grpo_ustat.runs.folder import RunFolder

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from commands import compose  # noqa: E402

ROOT = Path(__file__).parents[2]
SMALL = (  # 4 completions each: chunks of 2, 2 and 1 questions
    "debug=mse", "model=tiny_direct", "study.questions=5", "rollout_batch_size=8",
    "budget.pool_completions=4", "budget.feature_sketch=64", "budget.gradient_sketch=64",
    "temperature=3.0",  # rewards differ within each chunk
)  # fmt: skip
SECONDS = [field.name.startswith("seconds") for field in fields(WorkCost)]


def asked(*overrides, small=SMALL):
    config = compose("mse", *small, *overrides)
    return config, configured_task(config.task_options, config.model).prompts("study")[
        : config.study.questions
    ]


def part(folder, which, *overrides):
    """Fill the part; how many questions are whole then."""
    config, prompts = asked(f"pool={folder}", f"study.part={which}", *overrides)
    return build_part(config, prompts, folder)


def undivided(folder, *overrides):
    build_pool(*asked(*overrides), folder)
    return contents(folder)


def contents(folder):
    """Every file's arrays as bytes, the clock left out."""
    found = {"pool.json": (folder / "pool.json").read_bytes()}
    for file in folder.glob("*.safetensors"):
        arrays = load_file(file)
        arrays["cost"] = arrays["cost"][~np.array(SECONDS)]
        found[file.name] = {name: value.tobytes() for name, value in arrays.items()}
    return found


@pytest.mark.slow
def test_parts_are_whole_chunks_and_end_as_one_job(tmp_path):
    one = undivided(tmp_path / "one")
    assert [part(tmp_path / "parts", f"{k}/2") for k in (2, 1)] == [2, 5]
    assert contents(tmp_path / "parts") == one
    assert len(one) == 1 + 5


class Shelf:
    """A store that only says how many completions of each question are there."""

    def __init__(self, reached):
        self.reached = reached

    def stored_completions(self, prompts, size, kind):
        return [self.reached[prompt.id] for prompt in prompts]


def test_parts_share_out_every_chunk_whatever_is_there(rng):
    """None twice, none left out; and what others make in the meantime moves none."""
    config, prompts = asked("pool=x", "study.questions=8")
    owner = {}
    for _ in range(30):
        shelf = Shelf({prompt.id: int(rng.choice([0, 4, 6])) for prompt in prompts})
        whole = _chunks_to_sample(config.sampling, (1, 1), prompts, shelf, 6)
        for k in (1, 2, 3):
            for first, chunk in _chunks_to_sample(config.sampling, (k, 3), prompts, shelf, 6):
                assert owner.setdefault((first, tuple(chunk)), k) == k
                whole.remove((first, chunk))
        assert whole == []
    assert set(owner.values()) == {1, 2, 3}


@pytest.mark.parametrize(
    "device, part, questions, sizes",
    [
        ("cpu", None, 40, 20 * [2]),
        ("cuda", None, 40, 13 * [3] + [1]),  # 16 chunks would have 2.5 questions
        ("cuda", None, 20, 10 * [2]),  # never less than what fits side by side
        ("cuda", None, 200, 25 * [8]),  # four times that at most
        ("cuda", "1/2", 200, 14 * [7] + [4]),  # 29 chunks for two jobs, this one and 14
    ],
)
def test_a_chunk_on_an_accelerator_holds_more_than_fits_side_by_side(
    device, part, questions, sizes
):
    config = compose("mse", *SMALL)
    launch, study = replace(config.launch, device=device), replace(config.study, part=part)
    config = replace(config, launch=launch, study=study)
    prompts = [Prompt(str(i), str(i), "", "", "") for i in range(questions)]
    shelf = Shelf(dict.fromkeys(map(str, range(questions)), 0))
    chunks = _chunks_to_sample(config.sampling, config.study.share, prompts, shelf, 4)
    assert [len(chunk) for _, chunk in chunks] == sizes
    assert part or sorted(sum((chunk for _, chunk in chunks), [])) == list(range(questions))


@pytest.mark.slow
def test_parts_extend_a_pool(tmp_path):
    grown = tmp_path / "grown"
    undivided(grown)
    more = "budget.pool_completions=6"
    assert [part(grown, f"{k}/2", more) for k in (1, 2)] == [4, 5]  # chunks of 4 and 1
    undivided(tmp_path / "one")
    assert contents(grown) == undivided(tmp_path / "one", more)


@pytest.mark.slow
def test_pools_of_several_folders_merge_by_copying(tmp_path, monkeypatch):
    """As `cp -n` does; the study then finds all of it and runs no model for the pool."""
    for k in (1, 2):
        part(tmp_path / str(k), f"{k}/2")
    assert (tmp_path / "1/pool.json").read_bytes() == (tmp_path / "2/pool.json").read_bytes()
    for file in (tmp_path / "1").glob("*"):
        if not (tmp_path / "2" / file.name).exists():
            shutil.copy(file, tmp_path / "2")
    monkeypatch.setattr(pool_module, "start_sampler", None)  # sampling now would fail
    config, _ = asked(f"pool={tmp_path / '2'}")
    study_run.run(config, RunFolder(tmp_path / "run", config))
    assert (tmp_path / "run" / "curves.csv").is_file()


@pytest.mark.slow
def test_the_part_is_not_what_the_run_is(tmp_path):
    one, other = (compose("mse", *SMALL, f"pool={tmp_path}", *x) for x in ((), ("study.part=1/2",)))
    assert folder_name(one) == folder_name(other)
    assert folder_name(one) != folder_name(compose("mse", *SMALL, "study.questions=6"))


@pytest.mark.parametrize(
    "overrides, told",
    [
        (("study.part=9/8", "pool=x"), "study.part=9/8: use k/n with k from 1 to n"),
        (("study.part=0/8", "pool=x"), "study.part=0/8: use k/n with k from 1 to n"),
        (("study.part=half", "pool=x"), "study.part=half: use k/n with k from 1 to n"),
        (("study.part=''", "pool=x"), "study.part=: use k/n with k from 1 to n"),
        (("study.part=1/2/3", "pool=x"), "study.part=1/2/3: use k/n with k from 1 to n"),
        (("study.part=1/2",), "study.part=1/2 with pool=null"),
    ],
)
def test_what_has_no_parts_is_refused(overrides, told):
    with pytest.raises(ConfigError, match=told):
        compose("mse", *SMALL, *overrides)


def test_an_imported_pool_has_no_parts(tmp_path):
    (tmp_path / "rollouts.parquet").touch()
    with pytest.raises(
        ConfigError, match="study.part=1/2 with pool=.*parquet: the rollouts of a file"
    ):
        compose("mse", *SMALL, f"pool={tmp_path / 'rollouts.parquet'}", "study.part=1/2")


@pytest.mark.slow
def test_jobs_at_once_leave_a_pool_and_no_run_folder(tmp_path):
    words = [sys.executable, "-m", "grpo_ustat.mse", *SMALL, "pool=pool"]
    jobs = [
        subprocess.Popen(
            [*words, f"study.part={k}/2"], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
            text=True, stdout=subprocess.PIPE,
        )
        for k in (1, 2)
    ]  # fmt: skip
    said = [job.communicate(timeout=300)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert any(text.endswith("without study.part to run the study\n") for text in said)
    assert not list(tmp_path.glob("outputs/mse/*"))
    assert contents(tmp_path / "pool") == undivided(tmp_path / "one")


@pytest.mark.slow
def test_a_study_goes_on_with_an_equal_pool_of_its_output_root(tmp_path, capsys):
    """The same files, linked; more questions draw the rest alone; another seed, another root and
    parts beyond what is asked for are left alone.
    """
    root = tmp_path / "out"

    def made(name, *overrides):
        folder = root / "mse" / name / "seed-0"
        config, prompts = asked(f"output_root={root}", *overrides)
        size = config.budget.pool_completions
        line = reuse_pool(
            Path(config.output_root), draws_of(config), folder / "pool", prompts, size
        )
        build_pool(config, prompts, folder / "pool", size)
        return line, contents(folder / "pool"), folder / "pool"

    first, files, pool = made("a")
    assert first == "" and files == undivided(tmp_path / "alone")
    line, again, linked = made("b", "group_sizes=[2]")
    assert line == f"20 completions of {pool} are reused" and again == files
    inodes = [{file.name: file.stat().st_ino for file in x.glob("*-*")} for x in (pool, linked)]
    assert inodes[0] == inodes[1]
    line, more, _ = made("c", "study.questions=7")
    assert line.startswith("20 completions") and files.keys() < more.keys()
    assert {name: more[name] for name in files} == files
    assert made("d", "seed=1")[0] == ""
    line, longer, _ = made("e", "budget.pool_completions=6")
    assert line.startswith("20 completions") and files.keys() < longer.keys()
    line, between, _ = made("f", "budget.pool_completions=5")  # a part of 4 to 6 cannot be split
    assert line.startswith("20 completions") and files.keys() < between.keys()
    assert made("b", "group_sizes=[2]")[0] == ""  # it has them all itself
    config, prompts = asked(f"output_root={root}")
    root, elsewhere = Path(config.output_root), tmp_path / "elsewhere" / "pool"
    assert reuse_pool(root, draws_of(config), elsewhere, prompts, 4) == ""
