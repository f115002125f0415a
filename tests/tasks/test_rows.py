"""Rows are the same in whatever file they come; what is wrong is named by file, row and field."""

from __future__ import annotations

import bz2
import gzip
import importlib.util
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_ustat.config.data import Gsm8kConfig
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.tasks.gsm8k import gsm8k
from grpo_ustat.tasks.rows import Origin

ROWS = [
    {"question": f"What is {n} + 1?", "answer": f"It is <<{n}+1={n + 1}>>{n + 1}.\n#### {n + 1}"}
    for n in range(7)
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
MARK = b"\xef\xbb\xbf"  # of the order of bytes, which editors on Windows write
CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train-*}
  - {split: test, path: main/test-*}
- config_name: other
  data_files:
  - {split: train, path: other/train-*}
---
"""


def parquet(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def written(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def every_file(folder):
    yield written(folder / "rows.jsonl", LINES)
    yield written(folder / "blank.jsonl", LINES.replace(b"\n", b"\n\n"))
    yield written(folder / "rows.txt", LINES)
    yield written(folder / "marked.jsonl", MARK + LINES)
    yield written(folder / "windows.jsonl", MARK + LINES.replace(b"\n", b"\r\n"))
    yield written(folder / "marked.gz", gzip.compress(MARK + LINES))
    yield written(folder / "array.json", json.dumps(ROWS, indent=1))
    yield written(folder / "rows.jsonl.gz", gzip.compress(LINES))
    yield written(folder / "rows.json.xz", lzma.compress(LINES))
    yield written(folder / "rows.jsonl.bz2", bz2.compress(LINES))
    yield parquet(folder / "rows.parquet")


def every_folder(folder):
    yield written(folder / "a" / "data.jsonl", LINES).parent
    yield written(folder / "b" / "my_train_rows.jsonl.gz", gzip.compress(LINES)).parent
    parquet(folder / "c" / "data" / "train-00000-of-00002.parquet", ROWS[:3])
    yield parquet(folder / "c" / "data" / "train-00001-of-00002.parquet", ROWS[3:]).parents[1]


def test_every_way_of_keeping_rows_gives_the_same(tmp_path):
    for place in (*every_file(tmp_path), *every_folder(tmp_path / "folders")):
        rows = Origin("dataset.path", str(place)).rows("train")
        assert [row.fields for row in rows] == ROWS, place
    assert rows[4].where.endswith("train-00001-of-00002.parquet row 2")


def test_zstandard_is_read_where_it_is_installed(tmp_path):
    file = tmp_path / "rows.jsonl.zst"
    with pa.CompressedOutputStream(str(file), "zstd") as opened:
        opened.write(LINES)
    if importlib.util.find_spec("zstandard"):
        assert [row.fields for row in Origin("k", str(file)).rows("train")] == ROWS
    else:
        with pytest.raises(ConfigError, match="rows.jsonl.zst .*zstandard"):
            Origin("k", str(file)).rows("train")


def test_a_folder_with_a_card_has_its_subsets(tmp_path):
    written(tmp_path / "README.md", CARD)
    parquet(tmp_path / "main" / "train-0.parquet")
    parquet(tmp_path / "main" / "test-0.parquet", ROWS[:2])
    parquet(tmp_path / "other" / "train-0.parquet", ROWS[:1])
    read = {s: len(Origin("k", str(tmp_path), "main").rows(s)) for s in ("train", "test")}
    assert read == {"train": 7, "test": 2}
    with pytest.raises(ConfigError, match="pick one among the available configs"):
        Origin("dataset.path", str(tmp_path)).rows("train")


def test_a_hub_id_is_loaded_as_configured(monkeypatch):
    import datasets

    asked = []

    def load_dataset(path, name, revision):
        asked.append((path, name, revision))
        return {"train": ROWS, "validation": ROWS[:1]}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    origin = Origin("dataset.path", "org/name", "main", "v1")
    rows = origin.rows("train")
    assert [row.fields for row in rows] == ROWS and asked == [("org/name", "main", "v1")]
    assert rows[2].where == "org/name split train row 3"
    with pytest.raises(ConfigError, match="'test', .*train, validation"):
        origin.rows("test")


def test_a_hub_that_cannot_be_reached_says_what_to_do(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"org/name .*dataset.path=FILE_OR_FOLDER"):
        Origin("dataset.path", "org/name").rows("train")


# ----------------------------------------------------------------------- what users get wrong


def config(path, **fields):
    defaults = dict.fromkeys(("subset", "revision", "test_path", "test_revision", "reward"))
    sizes = {"train_size": None, "test_size": None, "study_size": 2}
    names = {"name": "gsm8k", "kind": "gsm8k", "seed": 0, "train_split": "train"}
    options = defaults | sizes | names | {"test_split": "test"} | fields
    return Gsm8kConfig(path=str(path), **options)


def refused(match, path, **fields):
    with pytest.raises(ConfigError, match=match) as caught:
        dataset = config(path, **fields)
        dataset.check()
        gsm8k(dataset, {"train": None, "test": None, "study": 2, "examples": 0}, 0)
    assert "\n" not in str(caught.value)


BAD_LINES = {
    '{"question": "x", "answer"': r"bad.jsonl row 8 is not valid JSON: ",
    '["x", "y"]': "row 8 is .'x', 'y'., it must be an object with named fields",
    '{"question": "x"}': "bad.jsonl row 8: field answer is missing, the row has question",
    '{"question": "x", "answer": 4}': "row 8: field answer is 4, it must be non-empty text",
    '{"question": " ", "answer": "#### 4"}': "row 8: field question is ' ', it must be non-empty",
    '{"question": ["x"], "answer": "#### 4"}': r"row 8: field question is \['x'\], it must be",
    '{"question": "x", "answer": "four"}': "row 8: field answer is 'four', it must be a solution",
    '{"question": "x", "answer": "#### four"}': "row 8: .* ends with #### and a number",
    '{"question": "x", "answer": "3 #### "}': "row 8: .* ends with #### and a number",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_row_is_named(line, tmp_path):
    good = written(tmp_path / "good.jsonl", LINES)
    bad = written(tmp_path / "bad.jsonl", LINES + line.encode() + b"\n")
    refused(BAD_LINES[line], bad, test_path=str(good))
    refused(BAD_LINES[line], good, test_path=str(bad))


def test_a_row_of_a_parquet_file_is_named(tmp_path):
    good = written(tmp_path / "good.jsonl", LINES)
    bad = parquet(tmp_path / "bad.parquet", [*ROWS, {"question": "x", "answer": None}])
    refused("bad.parquet row 8: field answer is missing", bad, test_path=str(good))


def test_other_fields_are_named(tmp_path):
    other = written(tmp_path / "other.jsonl", '{"problem": "x", "solution": "y"}\n')
    told = "row 1: field question is missing, the row has problem, solution"
    refused(told, other, test_path=str(written(tmp_path / "good.jsonl", LINES)))


@pytest.mark.parametrize(
    "name, content, match",
    [
        ("empty.jsonl", "", "empty.jsonl cannot be read: it is empty"),
        ("rows.md", "# rows", "rows.md row 1 is not valid JSON"),
        ("rows.json", "[{]", "rows.json cannot be read: invalid JSON"),
        ("rows.parquet", LINES, "rows.parquet cannot be read: .*[Pp]arquet"),
        ("rows.jsonl.gz", LINES, "rows.jsonl.gz cannot be read: .*[Nn]ot a gzipped file"),
        ("cut.jsonl.gz", gzip.compress(LINES)[:-20], "cut.jsonl.gz cannot be read"),
        ("latin.jsonl", '{"question": "\xe9"}\n'.encode("latin-1"), "latin.jsonl cannot be read"),
    ],
)
def test_a_file_that_is_no_such_file_is_named(name, content, match, tmp_path):
    good = written(tmp_path / "good.jsonl", LINES)
    refused(match, written(tmp_path / name, content), test_path=str(good))


def test_a_place_without_rows_is_named(tmp_path):
    (tmp_path / "none").mkdir()
    written(tmp_path / "notes" / "notes.md", "# notes")
    train_only = written(tmp_path / "half" / "train.jsonl", LINES).parent
    refused("none contains no readable rows", tmp_path / "none")
    refused("notes contains no jsonl, json, CSV or Parquet file", tmp_path / "notes")
    refused("has no split 'test', only train: set dataset.train_split", train_only)
    refused("has no split 'dev', only train", train_only, train_split="dev")
    refused("dataset.path=.*nowhere: no such file or folder", tmp_path / "nowhere")
    refused("dataset.path=nowhere.jsonl: no such file or folder", "nowhere.jsonl")
    refused("one file, which cannot contain two splits", train_only / "train.jsonl")
    missing = str(tmp_path / "no" / "test.jsonl")
    refused("dataset.test_path=.*test.jsonl: no such file", train_only, test_path=missing)
