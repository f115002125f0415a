"""Standard output that nobody reads, that is closed or on a full disk; what the system refuses any
command.
"""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import replace

import pytest

from grpo_ustat import __main__ as entry
from grpo_ustat.cli import app
from grpo_ustat.launch.command import load_command
from grpo_ustat.terminal.streams import lasting_output, tell


def output_of(prepare, lines=3):
    """Print lines within `lasting_output` in a fork with other standard streams.

    Returns:
        Its exit code, and on standard error where its descriptor 1 leads and what it said.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        code = 9
        try:
            os.dup2(writing, 2)
            sys.stdout = sys.stderr = None
            prepare()
            is_open = os.path.exists("/proc/self/fd/1")
            sys.stdout = open(1, "w", closefd=False) if is_open else None  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            try:
                with lasting_output():
                    for _ in range(lines):
                        tell("a line of a result")
                        sys.stdout.flush()
                    os.write(2, f"{os.readlink('/proc/self/fd/1')}\n".encode())
                code = 0
            except SystemExit as ended:
                code = ended.code
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading) as file:
        text = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def without_reader():
    reading, writing = os.pipe()
    os.dup2(writing, 1)
    os.close(reading)


def on_a_full_disk():
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def closed():
    os.close(1)


def test_output_without_a_reader_ends_nothing():
    assert output_of(without_reader) == (0, "/dev/null\n")


def test_output_that_a_disk_does_not_take_is_said_at_the_end():
    line = "error: standard output could not be written (No space left on device)\n"
    assert output_of(on_a_full_disk) == (1, f"/dev/null\n{line}")


def test_a_closed_output_is_no_descriptor_of_a_file():
    """Else the next file that is opened has number 1, and gets what libraries print."""
    assert output_of(closed) == (0, "/dev/null\n")


@pytest.mark.parametrize("verb", ["mse", "sweep", "report"])
def test_what_the_system_refuses_any_command_is_one_line(verb, monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x.json")

    monkeypatch.setattr(sys, "argv", ["grpo-ustat", verb, "runs=x"])
    monkeypatch.setattr(app, "print_help", full)
    monkeypatch.setattr("argparse.ArgumentParser.parse_args", full)
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "error: No space left on device: x.json: free space on the disk, then run the same command "
        "again\n"
    )


def test_a_mistake_of_ours_is_no_refusal_of_the_system(monkeypatch):
    def mistake(*_):
        raise KeyError("x")

    monkeypatch.setattr(sys, "argv", ["grpo-ustat", "mse"])
    monkeypatch.setattr(app, "print_help", mistake)
    with pytest.raises(KeyError):
        entry.main()


def test_a_report_that_the_system_refuses_is_one_line(monkeypatch, capsys, tmp_path):
    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["report", "runs=x"])
    with pytest.raises(SystemExit):
        app.main(replace(load_command("report"), load_run=lambda: refuse))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "then run the same command again" in line
