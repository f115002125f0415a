"""What a run makes of what the operating system refuses: each fault by itself, in a whole run.

    python scripts/benchmarks/faults.py OUT             # all, about 25 minutes of one core
    python scripts/benchmarks/faults.py OUT "mse: ulimit" report

Every run is a fork of this process, which has imported everything. A try is

    right      the run ended with code 0 and its result
    one line   it ended with another code and one line that begins with "error: "
    wrong      anything else: a traceback, several lines, a run that hangs, a result that is missing

Where it did not end right, the fault is taken away and the same command typed again, which must end
right without drawing a completion again that was there; or the try is wrong. Figures are stand-ins
of a few bytes, since drawing takes longer than all the rest.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet  # noqa: F401
import safetensors.numpy  # noqa: F401
from matplotlib.figure import Figure

import grpo_ustat.cli.app
import grpo_ustat.cli.multirun
import grpo_ustat.gap.study
import grpo_ustat.mse.study
import grpo_ustat.report.aggregate
import grpo_ustat.train.trainer  # noqa: F401
from grpo_ustat.__main__ import main as grpo_ustat_main

SECONDS = 240  # after which a run hangs
COMMANDS = {
    "mse": (
        "mse", "debug=mse", "model=tiny_direct", "study.questions=8", "group_sizes=[2,4]",
        "max_completion_length=6", "launch.workers=1", "budget.feature_sketch=256",
        "budget.gradient_sketch=256", "budget.pool_completions=8", "hydra.run.dir=run",
    ),
    "gap": (
        "gap", "study=lemma6", "study.replicates=100", "launch.workers=1", "hydra.run.dir=run"
    ),
    "train": (
        "train", "debug=train", "model=tiny_direct", "max_steps=3", "save_steps=1", "eval_steps=3",
        "dataset.test_size=16", "budget.rollouts=16", "group_size=4", "max_completion_length=6",
        "hydra.run.dir=run",
    ),
    "report": ("report", "runs=done", "name=x"),
}  # fmt: skip
FILES = {
    "mse": ("pool.json", "*.safetensors", "completions.parquet", "curves.csv"),
    "gap": ("curves.csv",),
    "train": ("metrics.jsonl", "completions.parquet", "eval.csv", "checkpoint-1", "checkpoint-3"),
}
EVERY = ("report.html", "result.json", "code.json", "config.yaml")
FIRST = {"mse": "*.safetensors", "gap": "curves.csv", "train": "checkpoint-2"}  # amid the work
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><path d="M 0 0 L 9 9"/></svg>'

Act = Callable[[], object]
Prepare = Callable[[Path], object]


def nothing(*_: object) -> None:
    """No fault, or nothing to prepare or to mend."""


@dataclass(frozen=True)
class Try:
    """A fault in a run.

    Attributes:
        words: the command line.
        fault: what is done in the run's process before it begins.
        prepare: what is done in its working folder before.
        mend: what takes the fault away there.
        again: the command line that is typed then.
    """

    words: tuple[str, ...]
    fault: Act = nothing
    prepare: Prepare = nothing
    mend: Prepare = nothing
    again: tuple[str, ...] | None = None


def refused_rename(pattern: str, number: int) -> Act:
    """The rename that completes a file of this name is refused."""

    def fault() -> None:
        rename = os.replace

        def replace(source: str, target: str, **options: int) -> None:
            if Path(target).match(pattern):
                raise OSError(number, os.strerror(number), str(source))
            rename(source, target, **options)

        os.replace = replace

    return fault


def before_rename(pattern: str, act: Act) -> Act:
    """Something happens just before the first file of this name is complete."""

    def fault() -> None:
        rename, happened = os.replace, []

        def replace(source: str, target: str, **options: int) -> None:
            if not happened and Path(target).match(pattern):
                happened.append(True)
                act()
            rename(source, target, **options)

        os.replace = replace

    return fault


def refused_figure(number: int, suffix: str = "pdf") -> Act:
    """A figure in this format is not written."""

    def fault() -> None:
        save = Figure.savefig

        def savefig(self: Figure, file: object, **options: object) -> None:
            if str(file).endswith(suffix):
                raise OSError(number, os.strerror(number), str(file))
            save(self, file, **options)

        Figure.savefig = savefig

    return fault


def limit(what: int, most: int) -> Act:
    """As `ulimit` sets it."""
    return lambda: resource.setrlimit(what, (most, most))


def limit_memory(more: int) -> Act:
    """So many bytes of addresses more than the process has."""

    def fault() -> None:
        status = Path("/proc/self/status").read_text()
        most = 1024 * int(re.findall(r"VmSize:\s+(\d+)", status)[0]) + more
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    return fault


def no_temporary_folder() -> None:
    """As Python finds where none of the usual ones can be written."""

    def refuse() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    tempfile.tempdir = None
    tempfile._get_default_tempdir = refuse


def output(kind: str) -> Act:
    """Standard output is closed, read by nobody (also the error stream), or on a full disk."""

    def fault() -> None:
        if kind == "closed":
            os.close(1)
            sys.stdout = sys.__stdout__ = None
            return
        if kind == "full":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        else:
            reader, writer = os.pipe()
            os.close(reader)
            for stream in (1, 2) if kind == "unread, and errors too" else (1,):
                os.dup2(writer, stream)
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115

    return fault


def kill_at_removal(number: int) -> Act:
    """The process is killed before it removes so many files and folders of the run."""

    def fault() -> None:
        count = [0]

        def counted(call: Callable[..., None]) -> Callable[..., None]:
            def remove(path: str, **options: int) -> None:
                count[0] += "/run" in os.path.abspath(path) or options.get("dir_fd") is not None
                if count[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                call(path, **options)

            return remove

        os.unlink, os.rmdir, os.remove = map(counted, (os.unlink, os.rmdir, os.remove))

    return fault


def may_mount() -> bool:
    """Whether this user may mount, as making a folder read-only for root needs."""
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run(["mount", "--bind", folder, folder], capture_output=True).returncode:
            return False
        subprocess.run(["umount", folder], check=True)
    return True


def mount_read_only() -> None:
    for options in (["--bind"], ["-o", "remount,bind,ro"]):
        subprocess.run(["mount", *options, "run", "run"], check=True, capture_output=True)


def tries_of_all(done: Path) -> dict[str, Try]:
    """Every try by its name; `done` holds a finished run of each command."""
    tries: dict[str, Try] = {}
    for name in ("mse", "gap", "train"):
        words, first = COMMANDS[name], FIRST[name]

        def add(what: str, fault: Act = nothing, name: str = name, **rest: object) -> None:
            tries[f"{name}: {what}"] = Try(**{"words": COMMANDS[name], "fault": fault} | rest)

        for file in (*FILES[name], *EVERY):
            add(f"disk full at {file}", refused_rename(file, errno.ENOSPC))
        for number, file in (
            (errno.EDQUOT, "result.json"), (errno.EIO, "code.json"), (errno.EIO, "result.json"),
            (errno.EACCES, "result.json"), (errno.ESTALE, "result.json"),
        ):  # fmt: skip
            add(f"{os.strerror(number)} at {file}", refused_rename(file, number))
        if name != "train":
            add("disk full at a figure", refused_figure(errno.ENOSPC))
        add("folder removed", before_rename(first, lambda: shutil.rmtree("run")))
        add("folder moved", before_rename(first, lambda: os.rename("run", "far")), mend=move_back)
        add("folder removed at the end", before_rename("result.json", lambda: shutil.rmtree("run")))
        add("folder becomes a file", before_rename(first, folder_to_file), mend=remove_file)
        add("folder becomes an empty one", before_rename(first, empty_folder))
        if may_mount():
            add("folder read-only", before_rename(first, mount_read_only), mend=unmount)
        add("working folder removed", before_rename(first, lambda: shutil.rmtree(os.getcwd())),
            mend=lambda place: place.mkdir(exist_ok=True))  # fmt: skip
        for most in (0, 1024, 20_000, 100_000):
            add(f"ulimit -f of {most} bytes", limit(resource.RLIMIT_FSIZE, most))
        for most in (8, 12, 24):
            add(f"ulimit -n {most}", limit(resource.RLIMIT_NOFILE, most))
        for more in (0, 10_000_000, 60_000_000):
            add(f"ulimit -v, {more} bytes more", limit_memory(more))
        add("no temporary folder", no_temporary_folder)
        add("TMPDIR that is not there", lambda: os.environ.update(TMPDIR="/nonexistent"))
        for kind in ("closed", "unread", "unread, and errors too", "full"):
            add(f"output {kind}", output(kind))

        overwrite = (*words, "on_existing=overwrite")
        links = {"mse": ["pool"], "train": ["checkpoint-2"], "gap": []}[name]
        for linked in ("run", ".hydra", "result.json", *links):
            prepare = with_link(done / name / "run", linked)
            add(f"overwrite, {linked} is a link", words=overwrite, prepare=prepare)
        add("overwrite, run is a link to nothing", words=overwrite,
            prepare=lambda place: (place / "run").symlink_to("nowhere/x"),
            mend=lambda place: (place / "run").unlink())  # fmt: skip
        add("overwrite, result.json is a folder", words=overwrite,
            prepare=with_folder_for_result(done / name / "run"))  # fmt: skip
        below = tuple(word.replace("=run", "=outputs/run") for word in overwrite)
        add("overwrite, outputs is a link", words=below,
            prepare=with_outputs_linked(done / name / "run"))  # fmt: skip
        for number in (1, 3, 6, 9, 12):
            for then, again in (("", None), (", then typed without overwrite", words)):
                add(f"overwrite, killed at removal {number}{then}", kill_at_removal(number),
                    words=overwrite, again=again,
                    prepare=with_link(done / name / "run", None))  # fmt: skip

    def add_report(
        what: str, fault: Act = nothing, more: Prepare = nothing, **rest: object
    ) -> None:
        def prepare(place: Path) -> None:
            copy_runs(done, place)
            more(place)

        tries[f"report: {what}"] = Try(COMMANDS["report"], fault, prepare, **rest)

    for file in ("runs.csv", "runs.tex", "report.html", "*.csv"):
        add_report(f"disk full at {file}", refused_rename(file, errno.ENOSPC))
    for suffix in ("pdf", "svg", "png"):
        add_report(f"disk full at a figure in {suffix}", refused_figure(errno.ENOSPC, suffix))
    for number in (errno.EIO, errno.EACCES, errno.EDQUOT, errno.EROFS):
        fault = refused_rename("report.html", number)
        add_report(f"{os.strerror(number)} at report.html", fault)
    place = "outputs/report"
    add_report("folder removed", before_rename("*.csv", lambda: shutil.rmtree(place)))
    add_report("folder moved", before_rename("*.csv", lambda: os.rename(place, "far")))
    add_report("runs removed", before_rename("*.csv", lambda: shutil.rmtree("done")),
               mend=lambda place: (place / "done").exists() or copy_runs(done, place))  # fmt: skip
    for most in (0, 1024, 20_000):
        add_report(f"ulimit -f of {most} bytes", limit(resource.RLIMIT_FSIZE, most))
    for most in (8, 12, 24):
        add_report(f"ulimit -n {most}", limit(resource.RLIMIT_NOFILE, most))
    for more in (0, 10_000_000):
        add_report(f"ulimit -v, {more} bytes more", limit_memory(more))
    add_report("no temporary folder", no_temporary_folder)
    for kind in ("closed", "unread", "unread, and errors too", "full"):
        add_report(f"output {kind}", output(kind))
    add_report("outputs is a link", more=link_outputs)
    add_report("outputs is a link to nothing",
               more=lambda place: (place / "outputs").symlink_to("nowhere"),
               mend=lambda place: (place / "outputs").unlink())  # fmt: skip
    add_report("outputs is a file", more=lambda place: (place / "outputs").write_text("x"),
               mend=lambda place: (place / "outputs").unlink())  # fmt: skip
    add_report("runs.csv is a folder",
               more=lambda place: (place / "outputs/report/x/runs.csv").mkdir(parents=True),
               mend=lambda place: shutil.rmtree(place / "outputs"))  # fmt: skip
    return tries


def folder_to_file() -> None:
    shutil.rmtree("run")
    Path("run").write_text("x")


def empty_folder() -> None:
    shutil.rmtree("run")
    os.mkdir("run")


def remove_file(place: Path) -> None:
    if (place / "run").is_file():
        (place / "run").unlink()


def move_back(place: Path) -> None:
    if (place / "far").exists():
        shutil.rmtree(place / "run", ignore_errors=True)
        (place / "far").rename(place / "run")


def unmount(place: Path) -> None:
    subprocess.run(["umount", place / "run"], capture_output=True)


def with_link(run: Path, linked: str | None) -> Prepare:
    """A finished run, of which a part lies elsewhere, behind a link."""

    def prepare(place: Path) -> None:
        shutil.copytree(run, place / "run")
        if linked:
            part = place / "run" if linked == "run" else place / "run" / linked
            part.rename(place / "elsewhere")
            part.symlink_to(place / "elsewhere")

    return prepare


def with_folder_for_result(run: Path) -> Prepare:
    """A finished run with a folder in the place of its result."""

    def prepare(place: Path) -> None:
        shutil.copytree(run, place / "run")
        (place / "run/result.json").unlink()
        (place / "run/result.json").mkdir()

    return prepare


def with_outputs_linked(run: Path) -> Prepare:
    """A finished run in `outputs`, a link."""

    def prepare(place: Path) -> None:
        link_outputs(place)
        shutil.copytree(run, place / "far/run")

    return prepare


def link_outputs(place: Path) -> None:
    (place / "far").mkdir()
    (place / "outputs").symlink_to("far")


def copy_runs(done: Path, place: Path) -> None:
    """Finished runs to report."""
    for name in ("mse", "gap"):
        shutil.copytree(done / name / "run", place / "done" / name / "x")


def save_a_stand_in(figure: Figure, file: object, **_: object) -> None:
    """In place of `Figure.savefig`."""
    if isinstance(file, io.StringIO):
        file.write(SVG.decode())
    elif hasattr(file, "write"):
        file.write(SVG)
    else:
        Path(str(file)).write_bytes(SVG if str(file).endswith("svg") else b"x" * 2000)


def run_forked(words: tuple[str, ...], place: Path, fault: Act = nothing) -> tuple[str, str]:
    """Type a command line in a folder, in a fork.

    Returns:
        `right`, `one line`, `killed` or `wrong`, and what it said last on its error stream.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        _run(words, place, fault, writer)
    os.close(writer)
    os.set_blocking(reader, False)
    said, until, status = b"", time.monotonic() + SECONDS, None
    while status is None:
        ended, state = os.waitpid(pid, os.WNOHANG)
        status = state if ended else None
        with suppress(BlockingIOError):
            while part := os.read(reader, 65536):
                said += part
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(reader)
            return "wrong", "hangs"
        time.sleep(0.02)
    os.close(reader)

    code, text = os.waitstatus_to_exitcode(status), said.decode(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    last = (lines or text.strip().splitlines() or [""])[-1]
    results = ("run/result.json", "outputs/run/result.json", "outputs/report/x/report.html")
    whole = any((place / name).is_file() for name in results)
    trace = re.search("Traceback|Exception ignored|stack trace|Error executing job", text)
    if code == -signal.SIGKILL:
        return "killed", last
    if code == 0 and whole and not trace:
        return "right", last
    if code > 0 and len(lines) == 1 and not trace:
        return "one line", last
    Path(f"{place}.err").write_text(text)
    return "wrong", f"{code}: {last}"


def _run(words: tuple[str, ...], place: Path, fault: Act, errors: int) -> None:
    """In the fork, which ends here; the error stream goes to this descriptor."""
    code = 1
    try:
        os.chdir(place)
        null = os.open(os.devnull, os.O_RDWR)
        for stream, target in enumerate((null, null, errors)):
            os.dup2(target, stream)
        os.close(null), os.close(errors)
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        sys.argv = ["grpo-ustat", *words]
        fault()
        try:
            grpo_ustat_main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BaseException:
        with suppress(OSError):
            os.write(2, traceback.format_exc().encode())
    os._exit(code)


def attempt(one: Try, place: Path) -> tuple[str, str]:
    """The kind of a try's end, and what was said."""
    place.mkdir(parents=True)
    one.prepare(place)
    kind, said = run_forked(one.words, place, one.fault)
    drawn = {file.name for file in place.rglob("*.safetensors")}
    one.mend(place)
    if kind == "right":
        return kind, said
    again, then = run_forked(one.again or one.words, place)
    if kind == "wrong":
        return kind, said
    # typed without overwrite, half a removed folder may be refused in a line
    if again != "right" and not (one.again and again == "one line"):
        return "wrong", f"{said} | typed again: {then}"
    kept = {file.name for file in place.rglob("*.safetensors")} >= drawn
    return (kind if kept else "wrong"), said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help="only tries whose name has one of these in it")
    options = parser.parse_args()
    Figure.savefig, Figure.draw_without_rendering = save_a_stand_in, nothing

    out = options.out.resolve()
    for name in ("mse", "gap", "train"):
        place = out / "done" / name
        if not (place / "run/result.json").is_file():
            place.mkdir(parents=True)
            assert run_forked(COMMANDS[name], place)[0] == "right", Path(f"{place}.err").read_text()
    tries = tries_of_all(out / "done")
    chosen = [x for x in tries if not options.names or any(part in x for part in options.names)]
    kinds: dict[str, Counter[str]] = {}
    for name in chosen:
        kind, said = attempt(tries[name], out / re.sub(r"\W+", "_", name))
        kinds.setdefault(name.partition(":")[0], Counter())[kind] += 1
        print(f"{kind:9} {name} | {said[:300]}", flush=True)
    print(json.dumps({name: {"tried": sum(c.values())} | c for name, c in kinds.items()}, indent=1))


if __name__ == "__main__":
    main()
