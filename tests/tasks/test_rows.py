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
from grpo_ustat.config.row_files import Row
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
    with pytest.raises(ConfigError, match=r"row 1: field solution is 'x\\ud800'"):
        Row({"solution": "x\ud800"}, "row 1").text("solution")
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


BAD_ROWS = {  # as row 8, behind seven good rows
    '{"question": "x", "answer"': r"bad.jsonl row 8 is not valid JSON: ",
    '["x", "y"]': "row 8 is .'x', 'y'., it must be an object with named fields",
    '{"question": "x", "answer": NaN}': "row 8: field answer is nan, it must be a finite number",
    '{"question": "x", "answer": -Infinity}': "row 8: field answer is -inf, it must be a finite",
    '{"question": "x", "answer": 1e999}': "row 8: field answer is inf, it must be a finite num",
    '{"question": "x", "answer": 1, "w": [{"v": NaN}]}': "row 8: field w is nan, it must be a f",
    r'{"question": "x\ud800", "answer": 1}': r"row 8: field question is 'x\\ud800', it must be",
    r'{"question": "x", "answer": 1, "w": {"\udc00": 2}}': r"row 8: field w is '\\udc00', it mu",
}
BAD_FILES = [
    ("empty.jsonl", "", "empty.jsonl cannot be read: it is empty"),
    ("rows.md", "# rows", "rows.md row 1 is not valid JSON"),
    ("rows.json", "[{]", "rows.json cannot be read: invalid JSON"),
    ("rows.parquet", LINES, "rows.parquet cannot be read: .*[Pp]arquet"),
    ("rows.jsonl.gz", LINES, "rows.jsonl.gz cannot be read: .*[Nn]ot a gzipped file"),
    ("cut.jsonl.gz", gzip.compress(LINES)[:-20], "cut.jsonl.gz cannot be read"),
    ("latin.jsonl", '{"question": "\xe9"}\n'.encode("latin-1"), "latin.jsonl cannot be read"),
    ("rows.csv", "question,answer\nq,a\na,b,c\n", "row 2 has more fields than the header"),
    ("rows.csv", 'question,answer\n"a,b\n', "rows.csv cannot be read: unexpected end of data"),
    *(("bad.jsonl", LINES + line.encode() + b"\n", told) for line, told in BAD_ROWS.items()),
]


@pytest.mark.parametrize("name, content, match", BAD_FILES)
def test_a_file_that_cannot_be_used_is_named_by_its_row(name, content, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        Origin("k", str(written(tmp_path / name, content))).rows("train")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_no_number_in_parquet_is_refused_by_row(value, tmp_path):
    bad = parquet(tmp_path / "bad.parquet", [{"x": value if n == 2 else 1.0} for n in range(8)])
    with pytest.raises(ConfigError, match=f"bad.parquet row 3: field x is {value}"):
        Origin("k", str(bad)).rows("train")


@pytest.mark.parametrize("fields, told", [
    ({"question": "x"}, "row 8: field answer is missing, the row has question"),
    ({"question": "x", "answer": None}, "bad.parquet row 8: field answer is missing"),
    ({"problem": "x"}, "row 8: field question is missing, the row has problem"),
    ({"question": "x", "answer": 4}, "row 8: field answer is 4, it must be non-empty text"),
    ({"question": " ", "answer": "#### 4"}, "row 8: field question is ' ', it must be non-empty"),
    ({"question": ["x"], "answer": "#### 4"}, r"row 8: field question is \['x'\], it must be"),
    ({"question": "x", "answer": "four"}, "row 8: field answer is 'four', it must be a solution"),
])  # fmt: skip
def test_a_row_that_is_no_question_is_named(fields, told, tmp_path):
    good = written(tmp_path / "good.jsonl", LINES)
    if "parquet" in told:
        bad = parquet(tmp_path / "bad.parquet", [*ROWS, fields])
    else:
        bad = written(tmp_path / "bad.jsonl", LINES + json.dumps(fields).encode())
    refused(told, bad, test_path=str(good))
    refused(told, good, test_path=str(bad))


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
