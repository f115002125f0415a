"""`python ...` as a fork of a process that has imported what commands import.

What a command imports takes longer than most runs of the tests. The process that is forked has run
nothing of a command, and each fork gets the caller's environment, folder and arguments, so that it
differs from a fresh one by its modules alone, and by figures in SVG alone unless `EVERY_FORMAT` is
in its environment. Where the environment differs by what imports read, a fresh one is started.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import subprocess
import sys
import tempfile
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module, invalidate_caches
from pathlib import Path

IMPORTED = (
    "grpo_ustat.train.trainer", "grpo_ustat.mse.study", "grpo_ustat.gap.run",
    "grpo_ustat.report.aggregate", "grpo_ustat.cli.app", "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_pdf", "matplotlib.backends.backend_svg", "pyarrow.parquet",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen2.tokenization_qwen2",
)  # fmt: skip
MAY_DIFFER = (
    "EVERY_FORMAT",
    "PYTHONPATH",
    "PYTEST_",
    "GRPO_USTAT_",
    "COLUMNS",
    "NO_COLOR",
    "RANK",
    "WORLD_SIZE",
)


def run_python(*words, cwd=None, env=None, timeout=1800):
    """As `subprocess.run([sys.executable, *words], capture_output=True, text=True)`, words being
    `-m`, a module and its arguments, or a script and its arguments.
    """
    env = dict(os.environ if env is None else env)
    cwd = str(Path.cwd() if cwd is None else cwd)
    command = [sys.executable, *map(str, words)]
    server, environment = _server()
    if _read_by_imports(env) != environment:
        return subprocess.run(
            command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout
        )
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("out", "err")]
        for file in files:
            os.mkfifo(file)
        request = dict(words=command[1:], cwd=cwd, env=env, files=[str(file) for file in files])
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        pid = int(server.stdout.readline())
        with ThreadPoolExecutor(len(files)) as readers:
            # to the end, which comes when the command's own processes have left as well
            texts = readers.map(Path.read_text, files)
            if not select.select([server.stdout], [], [], timeout)[0]:
                os.kill(pid, 9)
            code = int(server.stdout.readline())
            output, error = texts
    return subprocess.CompletedProcess(command, code, output, error)


def _read_by_imports(env):
    return {name: value for name, value in env.items() if not name.startswith(MAY_DIFFER)}


@cache
def _server():
    """One for each process of tests, and the environment in which it imports."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    root = Path(__file__).resolve().parents[2]
    server = subprocess.Popen(
        [sys.executable, "-P", __file__, str(root)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd="/",
    )  # fmt: skip
    server.wait()
    atexit.register(server.stdin.close)
    return server, _read_by_imports(env)


def _serve():
    """Fork for each line of standard input; print the fork's process id, then its exit code.

    Tests look at the children of their process, so this is none of them.
    """
    if os.fork():
        os._exit(0)
    sys.path.insert(0, sys.argv[1])
    for name in IMPORTED:
        import_module(name)
    del sys.path[0]
    for line in sys.stdin:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _become(**json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _become(words, cwd, env, files):
    """Do what a new interpreter would, and leave as it does."""
    code = 1
    try:
        os.environ.clear()
        os.environ.update(env)
        if "EVERY_FORMAT" not in env:
            figures = import_module("grpo_ustat.pages.figures")
            figures.UNDATED_METADATA = {"svg": figures.UNDATED_METADATA["svg"]}
        for number, file in enumerate(files, start=1):
            pipe = os.open(file, os.O_WRONLY)
            os.dup2(pipe, number)
            os.close(pipe)
        os.chdir(cwd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        own = env.get("PYTHONPATH", "").split(os.pathsep) if env.get("PYTHONPATH") else []
        module, sys.argv = words[0] == "-m", words[words[0] == "-m" :]
        sys.path[:0] = [cwd if module else str(Path(words[0]).parent), *own]
        invalidate_caches()
        if module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
