"""What a run folder holds is read as events: texts alone, without secrets, with damages named."""

from __future__ import annotations

import json

import hostile
import pytest
from tracked import Folder

from grpo_ustat.runs.events import Damaged, FolderReader
from grpo_ustat.terminal.streams import visible


def everything(path):
    reader = FolderReader(path)
    return [*reader.rows(), *reader.logs(), *reader.result()]


def test_all_events_in_order(tmp_path):
    folder = Folder(tmp_path / "run")
    folder.rows(1, 2)
    folder.evals(0, 2)
    folder.completions(1, 2)
    folder.finish(
        steps=2, curves=[{"mse": 1.0}], scaling={"c1": 2.0}, evals=[{"step": 0}],
        notes=["all is enumerated", "but for one"], files={"eval.csv": "f0"},
    )  # fmt: skip
    found = everything(folder.path)
    steps = [("row", 1), ("row", 2), ("eval sampled/test", 0), ("eval sampled/test", 2)]
    steps += [("completions", 1), ("completions", 2)]
    assert [(event.key, event.mark) for event in found[:6]] == steps
    assert [event.key for event in found[6:]] == ["figure figure", "table curves", "result"]
    told = {"steps": 2, "scaling/c1": 2.0, "notes": "all is enumerated\nbut for one"}
    assert found[-1].content == told


def test_only_files_that_changed_are_read_again(tmp_path):
    folder, reader = Folder(tmp_path / "run"), FolderReader(tmp_path / "run")
    folder.evals(0)
    folder.finish(steps=2)
    for number in (1, 0):
        assert len([*reader.logs()]) == number and len([*reader.result()]) == 2 * number
    folder.evals(0, 2)
    assert [event.step for event in reader.logs()] == [0, 2] and not [*reader.result()]


def test_a_result_with_other_numbers_is_another_one_and_a_resumed_step_is_not(tmp_path):
    folder = Folder(tmp_path / "run")
    folder.rows(1)
    folder.finish(steps=2, c1=1.0)
    sent = {event.key: event.mark for event in everything(folder.path)}
    folder.rewind(0)
    folder.rows(1, 2, shift=1.0)
    folder.finish(steps=2, c1=2.0)
    news = [event for event in everything(folder.path) if event.is_new(sent)]
    assert [(event.key, event.step) for event in news] == [("row", 2), ("result", 2)]


def test_a_row_that_is_being_written_is_left_out(tmp_path):
    folder = Folder(tmp_path / "run")
    folder.rows(1)
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    assert [event.step for event in FolderReader(folder.path).rows()] == [1]


def test_rows_that_are_none_are_left_out(tmp_path):
    folder = Folder(tmp_path / "run")
    folder.rows(1)
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('not JSON\n[1]\n{"reward": 1}\n{"step": "x"}\n{"step": 3, "reward": "y"}\n')
        file.write('{"step": 4, "reward": 1' + "0" * 400 + "}\n")
    folder.rows(5)
    one, two, three, _ = FolderReader(folder.path).rows()
    assert one.content["monitor/c1_reason"] == "silent"
    assert two.content == {"step": 3} and three.content == {"step": 4}


@pytest.mark.parametrize(
    "name, content, line",
    [
        ("result.json", '{"curves": 3}', "result.json is damaged: curves is 3, not a list"),
        ("result.json", "[" * 100_000, "result.json is damaged: it is nested more than 40 deep"),
        ("eval.csv", "step,decoding,split\nx,a,b\n", "eval.csv is damaged: step is 'x', not a"),
        ("eval.csv", "mean_reward\n1\n", "eval.csv is damaged: a row has no step"),
        ("code.json", "[]", "code.json is damaged: it is a list, not a mapping"),
        (".hydra/config.yaml", "3", ".hydra/config.yaml is damaged: it is 3, not a mapping"),
        ("completions.parquet", "x", "completions.parquet is damaged: "),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, line):
    folder = Folder(tmp_path / "run")
    folder.rows(1)
    (folder.path / name).write_text(content)
    with pytest.raises(Damaged) as caught:
        FolderReader(folder.path).config(), everything(folder.path)
    assert line in str(caught.value)


def test_a_configuration_is_told_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "correct-horse-battery")
    options = {"url": "https://me:pass@host/x", "note": "correct-horse-battery", "api_key": "k"}
    folder = Folder(tmp_path / "run", dataset={"options": options}, model={"revision": "8f" * 20})
    told = FolderReader(folder.path).config()
    assert set(told["dataset"]["options"].values()) == {"(redacted)"}
    assert told["model"]["revision"] == "8f" * 20 and "diff" not in told["code"]


@pytest.mark.parametrize("key", hostile.NAMES)
def test_names_are_texts(tmp_path, key):
    """Settings, columns, curves and completions: no escapes, no half letters."""
    name = hostile.NAMES[key]
    folder = Folder(tmp_path / "run", model={"name": name})
    line = {"step": 1, "reward": 0.5, name: 1.0, "monitor/c1_reason": name}
    (folder.path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    curve = {"method": "closed_form", "baseline": name, "mse": 0.5}
    folder.finish(summary=name, curves=[curve], **({name: name} if name else {}))
    config = FolderReader(folder.path).config()
    told = [event.content for event in everything(folder.path) if event.kind != "figure"]
    texts = texts_in([config, *told])
    assert not set("".join(texts)) & set(hostile.TERMINAL_ACTS)
    assert "".join(texts).encode() and config["model"]["name"] == visible(name)


def texts_in(content):
    """Every text of something nested, keys too."""
    if isinstance(content, str):
        return [content]
    if isinstance(content, dict):
        content = [*content, *content.values()]
    return [text for x in content for text in texts_in(x)] if isinstance(content, list) else []
