"""A mirror sends every item once, in order, whatever a run or a tracker does to it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import hostile
import psutil
import pytest
from launching import alive, until
from mirrored import STUBS, Folder, row, timeless

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.mirror import __main__ as command
from grpo_ustat.mirror import backends, follow
from grpo_ustat.mirror.backends import IN_SWEEP, offline_runs, sync_command
from grpo_ustat.mirror.follow import End, Mirroring, MirrorJob
from grpo_ustat.mirror.journal import InUse, Journal
from grpo_ustat.mirror.source import FolderReader
from grpo_ustat.terminal.streams import visible

WANDB = SimpleNamespace(name="wandb", project="p", finish_seconds=20)


class Kept:
    """A tracker that keeps what it is given; it may know how much it has, and fail."""

    lasting, arrived, fails_after = False, None, None

    def __init__(self, about):
        self.about, self.given, self.closed = about, [], None

    def send(self, index, items):
        if self.fails_after is not None and len(self.given) == self.fails_after:
            raise ConnectionError("gone")
        self.given.append((index, [item.key for item in items], items[-1].content))

    def flush(self):
        pass

    def close(self, outcome):
        self.closed = outcome
        return "here"


@pytest.fixture
def opened(monkeypatch):
    """The trackers that were opened, last one last."""
    found = []

    def opener(about):
        found.append(Kept(about))
        return found[-1]

    monkeypatch.setitem(follow.OPENERS, "kept", opener)
    return found


def send(path, outcome="done"):
    job = MirrorJob(str(path), {"name": "kept", "project": "p"}, outcome=outcome)
    return follow.follow(job, End(job), lambda text: None)


def keys(tracker):
    return [key for _, names, _ in tracker.given for key in names]


def test_all_items_in_order_once(tmp_path, opened):
    folder = Folder(tmp_path / "run")
    folder.rows(1, 2)
    folder.evals(0, 2)
    folder.completions(1, 2)
    folder.finish(steps=2, curves=[{"mse": 1.0}], scaling={"c1": 2.0}, evals=[{"step": 0}])
    assert send(folder.path) == (9, 0)
    given = ["row 1", "row 2", "eval 0/sampled/test", "eval 2/sampled/test", "completions 1"]
    given += ["completions 2", "figure figure", "table curves", "result result"]
    assert keys(opened[0]) == given and opened[0].closed == "done"
    assert [index for index, _, _ in opened[0].given] == [0, 1, 2, 3, 5, 6, 7, 8]
    assert opened[0].given[-1][2] == {"steps": 2, "scaling/c1": 2.0}
    send(folder.path)
    assert keys(opened[1]) == [] and opened[1].about.run_id == opened[0].about.run_id


def test_a_rewound_run_sends_no_step_twice_and_misses_none(tmp_path, opened):
    folder = Folder(tmp_path / "run")
    folder.rows(1, 2, 3, 4)
    send(folder.path, "stopped")
    folder.rewind(2)
    folder.rows(3, 4, 5)
    send(folder.path)
    assert keys(opened[0]) == [f"row {n}" for n in (1, 2, 3, 4)]
    assert keys(opened[1]) == ["row 5"] and opened[1].given[0][0] == 4


def test_a_rewound_step_with_other_numbers_is_sent_again(tmp_path, opened):
    folder = Folder(tmp_path / "run")
    folder.rows(1, 2, 3)
    send(folder.path, "stopped")
    folder.rewind(1)
    folder.rows(2, shift=1.0)
    folder.rows(3)
    send(folder.path)
    assert keys(opened[1]) == ["row 2"] and opened[1].given[0][0] == 3


def test_a_source_reads_while_it_is_written_and_rewound(tmp_path):
    folder, source = Folder(tmp_path / "run"), FolderReader(tmp_path / "run")
    assert source.new_events() == []
    folder.rows(1)
    file = folder.path / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"step": 2, "rew')
    assert [item.key for item in source.new_events()] == ["row 1"]
    assert source.new_events() == []
    file.write_bytes(whole)
    folder.rows(2)
    assert [item.key for item in source.new_events()] == ["row 2"]
    folder.rewind(0)
    folder.rows(1, 2, 3)
    assert [item.key for item in source.new_events()] == ["row 1", "row 2", "row 3"]


@pytest.fixture
def failed(tmp_path, opened, monkeypatch):
    """A run folder of three rows, of which a tracker took two and then failed."""
    folder = Folder(tmp_path / "run")
    folder.rows(1, 2, 3)
    with monkeypatch.context() as failing, pytest.raises(ConnectionError):
        failing.setattr(Kept, "fails_after", 2)
        send(folder.path)
    return folder


def test_what_a_tracker_that_failed_was_given_is_given_again(failed, opened):
    send(failed.path)
    assert keys(opened[1]) == ["row 1", "row 2", "row 3"]  # nobody knows what arrived


def test_a_tracker_that_knows_what_arrived_gets_the_rest(failed, opened, monkeypatch):
    monkeypatch.setattr(Kept, "arrived", 1)
    send(failed.path)
    assert keys(opened[1]) == ["row 2", "row 3"] and opened[1].given[0][0] == 1


def test_a_journal_survives_a_half_written_line(tmp_path):
    (tmp_path / "tracker").mkdir()
    file = tmp_path / "tracker" / "t.jsonl"
    file.write_text('{"run_id": "a"}\n{"key": "row 1", "digest": "x"}\n{"key": "ro')
    journal = Journal(tmp_path, "t")
    journal.take()
    journal.settle()
    again = Journal(tmp_path, "t")
    assert again.run_id == "a" and again.entries == [("row 1", "x")] and again.settled == 1


def test_one_mirror_at_a_time(tmp_path):
    first, second = Journal(tmp_path, "t"), Journal(tmp_path, "t")
    first.take()
    with pytest.raises(InUse, match="another mirror is at work"):
        second.take()


def test_a_tracker_learns_no_secret(tmp_path, opened, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "correct-horse-battery")
    options = {"url": "https://me:pass@host/x", "note": "correct-horse-battery", "api_key": "k"}
    folder = Folder(tmp_path / "run", dataset={"options": options}, model={"revision": "8f" * 20})
    send(folder.path)
    told = opened[0].about.config
    assert set(told["dataset"]["options"].values()) == {"(redacted)"}
    assert told["model"]["revision"] == "8f" * 20 and "diff" not in told["code"]


# A mirror in its own process, of a stub of wandb.


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Sets the stub's fault; returns what it was given."""
    path = os.pathsep.join([str(STUBS), *filter(None, sys.path)])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))

    def given():
        file = tmp_path / "seen"
        return [json.loads(line) for line in file.open()] if file.is_file() else []

    given.fault = lambda fault: monkeypatch.setenv("FAULT", fault)
    return given


def logged(given):
    return [seen["values"] for seen in given if "values" in seen]


def test_a_mirror_beside_a_run(tmp_path, stub, capfd):
    """It prints nothing of a tracker's rubbish, keeps no signal from the run, and says where."""
    stub.fault("prints in log")
    folder = Folder(tmp_path / "run")
    one = Mirroring(folder.path, WANDB)
    folder.rows(1, 2)
    until(lambda: len(logged(stub())) == 2)
    process = psutil.Process(one._process.pid)
    assert process.nice() == 19 and os.getpgid(process.pid) != os.getpgid(0)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    folder.rows(3)
    folder.finish(steps=3)
    one.finish("stopped", grace_seconds=60)
    expected = [timeless(row(step)) for step in (1, 2, 3)]
    assert [timeless(values) for values in logged(stub())][:3] == expected
    assert stub()[-3:] == [{"preempting": True}, {"exit_code": 75}, {"written": True}]
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") <= 2 and "logger=wandb: wandb sync nowhere" in err
    assert "rubbish" in (folder.path / "tracker" / "wandb.log").read_text(errors="replace")


def offline_run(folder, name, *, sent=False):
    place = folder / "tracker/wandb" / f"offline-run-{name}"
    place.mkdir(parents=True)
    if sent:
        (place / f"run-{name}.wandb.synced").touch()
    with (folder / "tracker/wandb-offline.txt").open("a") as file:
        file.write(f"{place}\n")
    return place


def test_one_command_sends_all_offline_runs_of_a_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = Path("outputs/train")
    folders = [sweep / name / "seed=0" for name in ("a", "b", "c")]
    places = [offline_run(folder, "1") for folder in folders[:2]]
    assert [offline_runs(folder) for folder in folders] == [[places[0]], [places[1]], []]
    pattern = "wandb sync outputs/train/*/seed=*/tracker/wandb/offline-run-*"
    assert sync_command(places, sweep) == pattern
    assert sync_command(places[:1], sweep) == f"wandb sync {places[0]}"
    sent = offline_run(folders[2], "2", sent=True)  # the pattern would lead to it too
    assert sent.is_dir() and offline_runs(folders[2]) == []
    assert sync_command(places, sweep) == f"wandb sync {places[0]} {places[1]}"


def test_a_run_names_all_its_offline_folders_also_after_it_was_moved(tmp_path, stub, capfd):
    """A run that was started several times has one for each; what is sent is not named again."""
    folder = Folder(tmp_path / "was")
    first, second = (offline_run(folder.path, name) for name in ("1", "2 b"))
    offline_run(folder.path, "0", sent=True)
    one = Mirroring(folder.path, WANDB)
    folder.rows(1)
    folder.finish(steps=1)
    one.finish("done", grace_seconds=60)
    assert f"wandb sync {first} '{second}' nowhere\n" in capfd.readouterr().err
    moved = folder.path.rename(tmp_path / "is")
    inside = [moved / "tracker/wandb" / f"offline-run-{name}" for name in ("1", "2 b")]
    assert offline_runs(moved) == inside
    assert sync_command(inside) == f"wandb sync {inside[0]} '{inside[1]}'"


def test_a_run_of_a_sweep_leaves_the_command_to_the_sweep(tmp_path, stub, capfd, monkeypatch):
    monkeypatch.setenv(IN_SWEEP, "1")
    folder = Folder(tmp_path / "run")
    one = Mirroring(folder.path, WANDB)
    folder.rows(1)
    folder.finish(steps=1)
    one.finish("done", grace_seconds=60)
    assert "sync" not in capfd.readouterr().err
    assert (folder.path / "tracker/wandb-offline.txt").read_text() == "nowhere\n"


def test_a_mirror_ends_with_its_run(tmp_path, stub):
    """Also where the run is killed; then it sends what there is."""
    folder = Folder(tmp_path / "run")
    folder.rows(1)
    pid = os.fork()
    if not pid:
        one = Mirroring(folder.path, WANDB)
        (tmp_path / "pid").write_text(str(one._process.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    left = psutil.Process(int((tmp_path / "pid").read_text()))
    until(lambda: not alive(left))
    assert [values["step"] for values in logged(stub())] == [1]
    assert stub()[-2:] == [{"exit_code": 1}, {"written": True}]


def test_the_command_reads_a_trackers_configuration():
    found = command.parse_logger(["logger=tensorboard", "logger.finish_seconds=3"])
    assert (found.name, found.finish_seconds) == ("tensorboard", 3.0)
    with pytest.raises(ConfigError, match="name one tracker: logger=wandb"):
        command.parse_logger(["logger=none"])
    with pytest.raises(ConfigError, match="logger 'tensorbord': did you mean tensorboard"):
        command.parse_logger(["logger=tensorbord"])


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hangs in log", "raises in init", "exits in log"])
def test_what_was_not_sent_can_be_sent_later(tmp_path, stub, fault, capfd):
    stub.fault(fault)
    folder = Folder(tmp_path / "run")
    folder.rows(1, 2)
    folder.finish(steps=2)
    start = time.monotonic()
    one = Mirroring(folder.path, SimpleNamespace(name="wandb", project="p", finish_seconds=6))
    one.finish("done", grace_seconds=60)
    assert time.monotonic() - start < 15 and one._process.poll() is not None
    err = capfd.readouterr().err
    assert "warning: logger=wandb: was not told 4 of 4" in err and "\x1b" not in err
    program, *command = shlex.split(err.rsplit("send it: ", 1)[1])
    assert program == "grpo-ustat"
    stub.fault("")
    done = subprocess.run(
        [sys.executable, "-m", "grpo_ustat", *command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert [values.get("reward") for values in logged(stub())][:2] == [1 / 7, 2 / 7]


def test_rows_that_are_none_are_left_out(tmp_path, opened):
    folder = Folder(tmp_path / "run")
    folder.rows(1)
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('not JSON\n[1]\n{"reward": 1}\n{"step": "x"}\n{"step": 3, "reward": "y"}\n')
        file.write('{"step": 4, "reward": 1' + "0" * 400 + "}\n")
    folder.rows(2)
    send(folder.path)
    assert keys(opened[0]) == [f"row {n}" for n in (1, 3, 4, 2)]
    assert opened[0].given[0][2]["monitor/c1_reason"] == "silent"
    assert opened[0].given[1][2] == {"step": 3} and opened[0].given[2][2] == {"step": 4}


@pytest.mark.parametrize(
    "name, content, line",
    [
        ("result.json", '{"curves": 3}', "result.json is damaged: curves is 3, not a list"),
        ("result.json", "[" * 100_000, "result.json is damaged: it is nested more than 40 deep"),
        (
            "eval.csv",
            "step,decoding,split\nx,a,b\n",
            "eval.csv is damaged: step is 'x', not a whole",
        ),
        ("eval.csv", "mean_reward\n1\n", "eval.csv is damaged: a row has no step"),
        ("code.json", "[]", "code.json is damaged: it is a list, not a mapping"),
        (".hydra/config.yaml", "3", ".hydra/config.yaml is damaged: it is 3, not a mapping"),
        ("completions.parquet", "x", "completions.parquet is damaged: "),
    ],
)
def test_a_damaged_file_is_named(tmp_path, opened, capsys, name, content, line):
    folder = Folder(tmp_path / "run")
    folder.rows(1)
    (folder.path / name).write_text(content)
    assert not command.send_folder(folder.path, SimpleNamespace(name="kept", project="p"))
    assert f"error: {folder.path}: {line}" in capsys.readouterr().err


@pytest.mark.parametrize("key", hostile.NAMES)
def test_a_tracker_gets_names_as_texts(tmp_path, monkeypatch, opened, key):
    """Of the run, its group, settings, columns and completions: no escapes, no half letters."""
    name = hostile.NAMES[key]
    folder = Folder(tmp_path / "run", model={"name": name})
    line = {"step": 1, "reward": 0.5, name: 1.0, "monitor/c1_reason": name}
    (folder.path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    curve = {"method": "closed_form", "baseline": name, "mse": 0.5}
    folder.finish(summary=name, curves=[curve], **({name: name} if name else {}))
    monkeypatch.setattr(follow.Path, "absolute", lambda path: Path(f"/x/{name}/{name}"))
    send(folder.path)
    about, (row, *_, result) = opened[0].about, opened[0].given
    texts = [about.name, about.group, *texts_in(about.config), *texts_in(row), *texts_in(result)]
    assert not set("".join(texts)) & set(hostile.TERMINAL_ACTS)
    assert "".join(texts).encode() and len(about.name) <= 120 and len(about.group) <= 120
    assert about.config["model"]["name"] == visible(name)


def texts_in(content):
    """Every text of something nested, keys too."""
    if isinstance(content, str):
        return [content]
    if isinstance(content, dict):
        content = [*content, *content.values()]
    return (
        [text for x in content for text in texts_in(x)] if isinstance(content, list | tuple) else []
    )


def test_trackers_are_given_the_names_of_the_run(tmp_path, monkeypatch):
    """wandb's stub is given them as they are; what it draws of them is its own affair."""
    given = {}

    def init(**options):
        given.update(options)
        return SimpleNamespace(offline=False, starting_step=0, define_metric=lambda *_, **__: None)

    settings = SimpleNamespace(model_fields={})
    wandb = SimpleNamespace(init=init, Settings=lambda **_: settings)
    wandb.Settings.model_fields = {}
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    about = backends.About(tmp_path, "id", "<b>[/b]$x", "${y}", "p", {"model": "=1"})
    backends.Wandb(about)
    assert (given["name"], given["group"], given["config"]) == (
        "<b>[/b]$x",
        "${y}",
        {"model": "=1"},
    )
