"""Runs and pools of other data are other runs and pools; what was left out is told and recorded."""

from __future__ import annotations

import json
import os

import pytest
import readme
from commands import compose
from launching import finished

from grpo_ustat.config.identity import data_fingerprint, folder_name, identity, weights_fingerprint
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.mse.pool_store import PoolStore, draws_of


def rows(first, count):
    for n in range(first, first + count):
        yield {"question": f"{n}+{n % 7}", "answer": f"{n}+{n % 7}={n + n % 7}\n#### {n + n % 7}"}


def kept(folder, train, test):
    folder.mkdir(exist_ok=True)
    for name, found in (("train", train), ("test", test)):
        lines = "".join(json.dumps(row) + "\n" for row in found)
        (folder / f"{name}.jsonl").write_text(lines)
    return folder


def train_config(*overrides):
    return compose("train", "dataset=gsm8k", *overrides)


@pytest.mark.slow
def test_a_file_counts_by_its_content_and_a_hub_id_by_its_revision(tmp_path):
    folder = kept(tmp_path / "data", rows(0, 20), rows(50, 5))
    before = train_config(f"dataset.path={folder}")
    (folder / "notes.md").write_text("other words")
    same = train_config(f"dataset.path={folder}/../{folder.name}")
    assert folder_name(same) == folder_name(before)
    first, draws = identity(before), draws_of(composed_study(folder))
    kept(folder, rows(1, 20), rows(50, 5))
    assert {k for k, v in identity(before).items() if first[k] != v} == {"data"}
    assert draws_of(composed_study(folder)) != draws
    hub = [train_config(f"dataset.revision={revision}") for revision in ("null", "abc")]
    assert len({folder_name(config) for config in hub}) == 2
    assert data_fingerprint(hub[0].dataset) is None and "data" not in identity(hub[0])


@pytest.mark.slow
def test_a_card_says_what_is_train_and_test_and_counts(tmp_path):
    folder = kept(tmp_path / "data", rows(0, 20), rows(50, 5))
    before = folder_name(train_config(f"dataset.path={folder}"))
    (folder / "README.md").write_text("---\nconfigs: []\n---\n")
    assert folder_name(train_config(f"dataset.path={folder}")) != before


def composed_study(folder):
    return compose("mse", "dataset=gsm8k", f"dataset.path={folder}")


def test_a_list_of_ids_and_a_test_file_count_too(tmp_path):
    listed = tmp_path / "ids.txt"
    listed.write_text("a\n")
    overrides = [
        "dataset=math",
        "prompt=chat_boxed",
        "dataset.path=org/name",
        f"dataset.test_ids={listed}",
    ]
    config = compose("train", *overrides)
    before = folder_name(config)
    listed.write_text("b\n")
    assert folder_name(config) != before


@pytest.mark.slow
def test_a_pool_of_other_data_is_refused(tmp_path):
    folder = kept(tmp_path / "data", rows(0, 20), rows(50, 5))
    PoolStore(tmp_path / "pool", draws_of(composed_study(folder))).open()
    PoolStore(tmp_path / "pool", draws_of(composed_study(folder))).open()
    kept(folder, rows(1, 20), rows(50, 5))
    with pytest.raises(ConfigError, match="completions for data="):
        PoolStore(tmp_path / "pool", draws_of(composed_study(folder))).open()


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["train", "mse"])
def test_what_was_left_out_is_told_and_recorded(entry, tmp_path):
    train = [*rows(0, 40), *rows(50, 2), *rows(3, 1)]
    folder = kept(tmp_path / "data", train, [*rows(50, 20), *rows(1000, 1)])
    command = f"{entry} dataset=gsm8k dataset.path={folder} dataset.study_size=8 debug={entry}"
    command += " prompt.max_length=6"  # characters: all but the last test question's
    command += " max_completion_length=96"
    code, told = finished(*command.split(), cwd=tmp_path, seconds=600)
    assert code == 0, told
    left_out = {
        "train questions that are also test questions": 2,
        "repeated train questions": 1,
    }
    if entry == "train":
        left_out["test questions whose prompts exceed prompt.max_length=6 tokens"] = 1
    assert json.loads(readme.only(tmp_path, "result.json").read_text())["left_out"] == left_out
    assert told.count("2 train questions") == 1


def test_tf32_counts_where_it_is_in_use():
    plain, cuda, narrow = (
        compose("mse", *more)
        for more in (
            (),
            ("launch.device=cuda",),
            ("launch.device=cuda", "model.dtype=bfloat16"),
        )
    )
    assert [x.computes_tf32 for x in (plain, cuda, narrow)] == [False, True, False]
    assert identity(cuda)["tf32"] and draws_of(cuda)["tf32"]
    assert not identity(plain)["tf32"] and not draws_of(plain)["tf32"]


def test_a_pool_of_other_products_is_refused_by_name(tmp_path):
    full, tf32 = (draws_of(compose("mse", *more)) for more in ((), ("launch.device=cuda",)))
    for first, second, word in ((full, tf32, "full precision"), (tf32, full, "TF32")):
        folder = tmp_path / word
        PoolStore(folder, first).open()
        with pytest.raises(ConfigError, match=f"has scores in {word}.* or another pool=DIR"):
            PoolStore(folder, second).open()


def test_large_files_count_by_content_not_by_time(tmp_path):
    """A file of weights above 64 MiB by its size and by blocks, which a change everywhere hits."""
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "model.safetensors"
    with file.open("wb") as weights:
        weights.truncate(2**26 + 2**20)
    before = weights_fingerprint(str(tmp_path))
    os.utime(file, (1, 1))
    assert weights_fingerprint(str(tmp_path)) == before
    stat = file.stat()
    with file.open("r+b") as weights:
        for place in range(0, stat.st_size, 2**17):
            weights.seek(place)
            weights.write(b"x")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_size == stat.st_size
    assert weights_fingerprint(str(tmp_path)) != before
