"""Checks of `grpo-ustat doctor`; each is a function of the output folder.

Each check imports its packages itself, so that a missing package does not break other checks.
"""

from __future__ import annotations

import netrc
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

from grpo_ustat import __version__
from grpo_ustat.config.command_line import install_line, is_installed
from grpo_ustat.config.run import TRACKERS

if TYPE_CHECKING:
    import torch

Answer = TypeVar("Answer")
PACKAGE = "grpo-ustat"
# Extras of this package that every command needs; "" stands for the base requirements.
COMMAND_EXTRAS = ("", "torch", "cli")
WANDB_SERVER = "https://api.wandb.ai"
SUBMITIT_PLUGIN = "hydra_plugins.hydra_submitit_launcher"
CGROUP = Path("/sys/fs/cgroup")
CONNECT_SECONDS = 2.0
SCONTROL_SECONDS = 10.0
# Importing torch and starting CUDA takes 5 s.
CUDA_SECONDS = 20.0
SUM_SECONDS = 30.0
# Largest accepted relative error of a float32 matrix product; with TF32 the error is 3e-4.
FLOAT32_ERROR = 1e-3
# Accepted range of the relative error of a matrix product in bfloat16, whose precision is 8 bits.
BF16_ERROR = (3e-4, 2e-2)
# Memory in bytes. Loading torch needs `MIN_MEMORY`, and training a small model needs less than
# `ENOUGH_MEMORY`.
MIN_MEMORY, ENOUGH_MEMORY = 1e9, 4e9
TRIAL_BYTES = 2**24
MIN_DISK_BYTES = 5e9
# At this speed, a checkpoint with 0.5 B parameters takes 5 minutes.
MIN_BYTES_PER_SECOND = 20e6
OTHER_FOLDER = "choose another folder: --output DIR for this command, hydra.run.dir=DIR for runs"
# Deadline and memory limit of an answer judge, as in conf/dataset/math.yaml, and extra seconds that
# are allowed on busy machines.
JUDGE_SECONDS, JUDGE_MEMORY_GB, JUDGE_SPARE_SECONDS = 2.0, 2.0, 4.0
JUDGE_FIX = "pip install -c constraints.txt 'math-verify[antlr4-9-3]'; only dataset=math needs it"
# Code that locks a file until its process is killed.
LOCK_CODE = (
    "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB);"
    "print('locked', flush=True); sys.stdin.read()"
)
RANK_CODE = "import sys; from grpo_ustat.doctor.checks import add_up; add_up(sys.argv[1])"


class Finding(NamedTuple):
    """Result of a check."""

    # `warning`: runs work, but a setting is probably a mistake. `failed`: runs will fail or give
    # wrong results.
    status: Literal["ok", "warning", "failed"]
    message: str
    # Suggested fix; empty if the status is ok.
    fix: str = ""


def ok(message: str) -> Finding:
    """Return a finding without problems."""
    return Finding("ok", message)


def warning(message: str, fix: str) -> Finding:
    """Return a finding for a setting that is probably a mistake but does not stop runs."""
    return Finding("warning", message, fix)


def failed(message: str, fix: str) -> Finding:
    """Return a finding for a problem that makes runs fail or give wrong results."""
    return Finding("failed", message, fix)


def check_code(_: Path) -> Finding:
    """Report the version and commit of this package, and the versions of Python and the system."""
    from grpo_ustat.runs.folder import code_state

    state = code_state()
    commit = f"commit {state['commit'][:10]}" if state["commit"] else "not from a git clone"
    changes = ", with uncommitted changes" if state["diff"] else ""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    python = f"Python {platform.python_version()} on {system}"
    return ok(f"grpo_ustat {__version__}, {commit}{changes}; {python}")


def check_packages(_: Path) -> Finding:
    """Check that the versions of required and installed optional packages are in range."""
    from packaging.requirements import Requirement

    def problems(requirements: Iterable[Requirement]) -> dict[Requirement, str]:
        """Return the installed version, or "missing", of each unmet requirement."""
        versions = {x: installed_version(x.name) for x in requirements}
        return {
            x: here or "missing"
            for x, here in versions.items()
            if here is None or not x.specifier.contains(here, prereleases=True)
        }

    try:
        declared = [Requirement(text) for text in requires(PACKAGE) or ()]
    except PackageNotFoundError:
        return warning(
            f"{PACKAGE} runs from its sources without being installed, so package versions "
            "cannot be checked",
            "pip install -c constraints.txt -e '.[cli]'",
        )
    needed, optional = [], []
    for requirement in declared:
        marker, requirement.marker = requirement.marker, None
        if marker is None or any(marker.evaluate({"extra": x}) for x in COMMAND_EXTRAS):
            needed.append(requirement)
        elif installed_version(requirement.name):
            optional.append(requirement)
    for level, prefix, group in ((failed, "", needed), (warning, "optional: ", optional)):
        if wrong := problems(group):
            message = ", ".join(
                f"{x.name} is {here}, but {x} is needed" for x, here in wrong.items()
            )
            fix = " ".join(f"'{requirement}'" for requirement in wrong)
            return level(prefix + message, f"pip install -c constraints.txt {fix}")
    names = ("torch", "transformers", "accelerate", "hydra-core", "math-verify")
    versions = ", ".join(f"{name} {installed_version(name)}" for name in names)
    extras = ", ".join(sorted({x.name for x in optional})) or "none"
    return ok(f"{len(needed)} required packages are suitable: {versions}; optional: {extras}")


def installed_version(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_torch(_: Path) -> Finding:
    """List GPUs with memory and driver, and test matrix products in float32 and bfloat16."""
    import torch

    driver, built_for = _gpu_driver(), torch.version.cuda
    message = f"{torch.__version__}, CUDA {built_for}, driver {driver}"
    if error := cuda_error():
        return failed(
            f"{message}: {error}",
            "see dmesg and nvidia-smi: the GPU or its driver may need a restart",
        )
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    for device in gpus or ["cpu"]:
        exact, rough = (_product_error(device, x) for x in (torch.float32, torch.bfloat16))
        if not exact < FLOAT32_ERROR:
            return failed(
                f"{message}: {device} multiplies matrices with a relative error of {exact:.2g}",
                "use another GPU (CUDA_VISIBLE_DEVICES), or install torch again",
            )
        if not BF16_ERROR[0] < rough < BF16_ERROR[1]:
            return failed(
                f"{message}: {device} multiplies matrices in bfloat16 with a relative error of "
                f"{rough:.1e} instead of 2e-3",
                "use bf16=false and model.dtype=float32",
            )
    if gpus:
        message += f": {'; '.join(map(_gpu, gpus))}"
        if not torch.cuda.is_bf16_supported(including_emulation=False):
            return warning(
                f"{message}; this GPU only emulates bfloat16", "use bf16=false, which is faster"
            )
        return ok(message)
    if driver is None:
        return ok(f"{torch.__version__}, CPU only: launch.device=cpu")
    if built_for is None:
        return warning(
            f"{torch.__version__}, CPU only, but this machine has a GPU (driver {driver})",
            "install a torch with CUDA (https://pytorch.org), without -c constraints.txt",
        )
    return failed(
        f"{torch.__version__} cannot use this machine's GPU: it is built for CUDA {built_for}, "
        f"but the driver is {driver}",
        "install a newer driver, or a torch for an older CUDA; CUDA_VISIBLE_DEVICES must not be "
        "empty",
    )


@cache
def cuda_error() -> str | None:
    """Return the reason why CUDA does not start; None if it starts, or if there is no CUDA or GPU.

    CUDA is started in another process, because a crash or a hang would also affect this process.
    """
    import torch

    if torch.version.cuda is None or shutil.which("nvidia-smi") is None:
        return None
    code = "import torch; torch.cuda.is_available() and torch.cuda.init()"
    try:
        process = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, timeout=CUDA_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"CUDA did not start in {CUDA_SECONDS:g} s"
    return f"CUDA start ended with code {process.returncode}" if process.returncode else None


def _gpu_driver() -> str | None:
    """Return the version of the first GPU's driver; None if nvidia-smi or a GPU is missing."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.TimeoutExpired, subprocess.CalledProcessError, IndexError):
        return subprocess.check_output(command, text=True, timeout=5).splitlines()[0]
    return None


def _gpu(device: str) -> str:
    """Return the name and memory of a GPU."""
    import torch
    from rich.filesize import decimal

    free, total = torch.cuda.mem_get_info(device)
    name = torch.cuda.get_device_properties(device).name
    return f"{device} {name}, {decimal(free)} of {decimal(total)} free"


def _product_error(device: str, dtype: torch.dtype) -> float:
    """Return the relative error of a matrix product in float32 or autocast; NaN if not finite."""
    import torch

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator, dtype=torch.float64) for _ in range(2))
    kind = torch.device(device).type
    with torch.no_grad(), torch.autocast(kind, dtype, enabled=dtype is not torch.float32):
        product = (a.float().to(device) @ b.float().to(device)).double().cpu()
    exact = a.float().double() @ b.float().double()
    return float((product - exact).norm() / exact.norm())


def check_threads(_: Path) -> Finding:
    """Compare OMP_NUM_THREADS with the cores allowed by affinity, container and SLURM."""
    affinity = getattr(os, "sched_getaffinity", None)
    limits = [(len(affinity(0)) if affinity else os.cpu_count() or 1, "CPU affinity")]
    quota = _text(CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        limits.append((max(1, int(quota[0]) // int(quota[1])), "container limit"))
    task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if task.isdecimal():
        limits.append((int(task), "SLURM_CPUS_PER_TASK"))
    cores, reason = min(limits, key=lambda limit: limit[0])
    setting = os.environ.get("OMP_NUM_THREADS")
    message = f"{cores} cores ({reason}), OMP_NUM_THREADS={setting or 'unset'}"
    if setting is None:
        return ok(f"{message}; runs use launch.num_threads")
    if not setting.isdecimal() or int(setting) < 1:
        return failed(f"{message} is not a number of threads", "export OMP_NUM_THREADS=1")
    if int(setting) > cores:
        return warning(
            f"{message}: more threads than cores are far slower than a single thread",
            f"export OMP_NUM_THREADS={cores} or less; with several ranks, at most cores / ranks",
        )
    return ok(message)


def check_memory(_: Path) -> Finding:
    """Check the free memory of the machine or its container."""
    import psutil
    from rich.filesize import decimal

    machine = psutil.virtual_memory()
    free, total = machine.available, f"{decimal(machine.total)}"
    limit, used = (_text(CGROUP / f"memory.{name}").strip() for name in ("max", "current"))
    if limit.isdecimal() and used.isdecimal() and int(limit) - int(used) < free:
        free, total = int(limit) - int(used), f"{decimal(int(limit))} in the container"
    message = f"{decimal(max(0, free))} free of {total}"
    if free < MIN_MEMORY:
        return failed(message, "end other programs, or request more memory (SLURM: --mem)")
    if free < ENOUGH_MEMORY:
        return warning(
            message,
            "use the embedded policies, or estimate the memory of a run with dry_run=true",
        )
    return ok(message)


def _text(file: Path) -> str:
    """Return a file's text; empty if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def check_disk(folder: Path) -> Finding:
    """Check free space in the output folder, and write, sync, rename and read 16 MiB there."""
    from rich.filesize import decimal

    place, content = _nearest_folder(folder), os.urandom(TRIAL_BYTES)
    try:
        free, files = shutil.disk_usage(place).free, os.statvfs(place).f_favail
        with _trial_folder(place) as name:
            staged, target = Path(name) / "staged", Path(name) / "target"
            start = time.perf_counter()
            with staged.open("wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            speed = TRIAL_BYTES / (time.perf_counter() - start)
            os.replace(staged, target)
            same = target.read_bytes() == content
    except OSError as error:
        return failed(f"{place} cannot be written: {error.strerror or error}", OTHER_FOLDER)
    if not same:
        return failed(f"{place} returned different bytes from those written", OTHER_FOLDER)
    message = f"{decimal(free)} free in {place}, which writes {decimal(int(speed))}/s"
    if free < MIN_DISK_BYTES or 0 < files < 1000:
        return warning(
            f"{message}, room for {files} more files",
            f"estimate a run's disk use with dry_run=true, or {OTHER_FOLDER}",
        )
    if speed < MIN_BYTES_PER_SECOND:
        return warning(
            f"{message}: saving checkpoints will be slow", f"save less often, or {OTHER_FOLDER}"
        )
    return ok(message)


def check_locks(folder: Path) -> Finding:
    """Test the file lock of run folders, flock, from a second process and after a kill."""
    place = _nearest_folder(folder)
    remedy = f"mount it with working flock (Lustre: -o flock), or {OTHER_FOLDER}"
    try:
        with _trial_folder(place) as name:
            file = Path(name) / "lock"
            file.touch()
            owner, owns = _lock_holder(file)
            second, second_owns = _lock_holder(file)
            owner.kill()
            owner.communicate()
            third, third_owns = _lock_holder(file)
            for process in (second, third):
                process.kill()
                process.communicate()
    except OSError as error:
        return failed(f"{place} cannot be locked: {error.strerror or error}", OTHER_FOLDER)
    if not owns:
        return warning(
            f"the file system of {place} has no file locks (flock), so a second run in the same "
            "folder is not refused",
            remedy,
        )
    if second_owns:
        return failed(
            f"a second process got the lock that another process held in {place}, so two runs "
            "could write there at once",
            remedy,
        )
    if not third_owns:
        return failed(
            f"the lock of a killed process in {place} is still held, so a killed run could not be "
            "resumed",
            remedy,
        )
    return ok(f"file locks (flock) work in {place}, and the lock of a killed process is released")


def _lock_holder(file: Path) -> tuple[subprocess.Popen[str], bool]:
    """Start a process that locks a file; return the process, and True if it has the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", LOCK_CODE, str(file)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout
    return process, process.stdout.readline() == "locked\n"


def _nearest_folder(folder: Path) -> Path:
    """Return the folder if it exists, else its nearest existing parent."""
    return next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())


def _trial_folder(place: Path) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix=".grpo_ustat_doctor_", dir=place)


def check_cache(_: Path) -> Finding:
    """List models and data sets in the Hugging Face cache; offline, only these are available."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    from grpo_ustat.config.model import cache_folder

    here = sorted(f"cached:{path.parent.name}" for path in cache_folder().glob("*/config.json"))
    with suppress(CacheNotFound):
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
        here += sorted(f"{x.repo_type} {x.repo_id} {x.size_on_disk_str}" for x in repositories)
    offline = constants.HF_HUB_OFFLINE
    message = (
        f"HF_HOME={constants.HF_HOME}, HF_HUB_OFFLINE {'' if offline else 'not '}set; "
        f"cached: {', '.join(here) or 'none'}"
    )
    error = "" if offline else connection_error(constants.ENDPOINT)
    if error is None:
        return ok(f"{message}; others are downloaded on first use")
    if here and offline:
        return ok(message)
    return warning(
        f"{message}{error and f'; {error}'}: "
        "only embedded models and generated arithmetic are available",
        "on a machine with a network, run hf download MODEL and datasets.load_dataset(NAME), and "
        "copy HF_HOME; or set model.model_name_or_path and dataset.path to folders",
    )


def check_judge(_: Path) -> Finding:
    """Start the judge for MATH, and let it judge a right answer and one that never ends."""
    from grpo_ustat.tasks.verifier import JUDGED_VERDICTS, JudgeError, Verifier

    verifier = Verifier(1, JUDGE_SECONDS, JUDGE_MEMORY_GB)
    try:
        verifier.judge([(r"\boxed{1}", r"\boxed{1}")])
        start = time.monotonic()
        verdict = verifier.judge([(r"\boxed{7}", r"\boxed{9^{9^{9^9}}}")])[0]
        seconds = time.monotonic() - start
    except JudgeError as error:
        return failed(str(error), JUDGE_FIX)
    finally:
        verifier.close()
    if verdict in JUDGED_VERDICTS or seconds > JUDGE_SECONDS + JUDGE_SPARE_SECONDS:
        return failed(
            f"an answer that takes forever to judge was judged {verdict.value} after {seconds:.1f} "
            f"s, but the deadline is {JUDGE_SECONDS:g} s",
            "report this as a bug, and do not train with dataset=math on this machine",
        )
    return ok(f"the judge works, and stopped an answer that never ends after {seconds:.1f} s")


def check_slurm(_: Path) -> Finding:
    """Ping SLURM's controller, and check for the launcher that submits sweeps."""
    job = os.environ.get("SLURM_JOB_ID")
    place = f"inside job {job}" if job else "outside a job"
    if shutil.which("scontrol") is None:
        if not job:
            return ok("SLURM is not on this machine")
        return warning(
            f"{place}, without scontrol: a preempted run cannot request its restart",
            "add SLURM's commands to the job's PATH (in a container: bind them)",
        )
    try:
        process = subprocess.run(
            ["scontrol", "ping"], capture_output=True, text=True, timeout=SCONTROL_SECONDS
        )
        answer = " ".join((process.stdout + process.stderr).split())[:200] or "an empty answer"
        is_up = process.returncode == 0 and "UP" in answer
    except subprocess.TimeoutExpired:
        answer, is_up = f"no answer in {SCONTROL_SECONDS:g} s", False
    if not is_up:
        level = failed if job else warning
        return level(f"{place}, scontrol ping: {answer}", "ask the cluster's administrator")
    if not is_installed(SUBMITIT_PLUGIN):
        return warning(
            f"{place}, the controller is up; hydra/launcher=slurm needs hydra-submitit-launcher",
            install_line("slurm"),
        )
    return ok(f"{place}, the controller is up, and hydra/launcher=slurm is available")


def check_ranks(_: Path) -> Finding:
    """Test all-reduce between two processes with gloo, and on GPUs with NCCL."""
    import torch

    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    if error := all_reduce_error("gloo", 2):
        by_loopback = {"GLOO_SOCKET_IFNAME": loopback}
        if interface is None and all_reduce_error("gloo", 2, by_loopback) is None:
            return warning(
                f"gloo: two ranks cannot connect through this machine's name ({error}), but they "
                f"can through {loopback}",
                f"export GLOO_SOCKET_IFNAME={loopback}; with several machines, use the name of "
                "their network interface instead",
            )
        return failed(
            f"gloo: two ranks cannot compute a sum ({error})",
            "check that no firewall blocks 127.0.0.1; check GLOO_SOCKET_IFNAME and MASTER_ADDR",
        )
    message = "gloo works between two ranks" + (f" over {interface}" if interface else "")
    gpus = min(2, torch.cuda.device_count()) if cuda_error() is None else 0
    if not gpus:
        return ok(message)
    message = f"{message}; NCCL on {gpus} GPU{'s' * (gpus > 1)}"
    if error := all_reduce_error("nccl", gpus):
        return failed(
            f"{message} does not work ({error})",
            "find the reason with NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 may help",
        )
    return ok(f"{message} works")


def all_reduce_error(
    backend: str, count: int, environment: Mapping[str, str] | None = None
) -> str | None:
    """All-reduce 1, ..., count in `count` processes; return the reason for a failure, else None."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | dict(environment or {}) | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK_CODE, backend],
            env=shared | {"RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )  # fmt: skip
        for rank in range(count)
    ]
    end, answers = time.monotonic() + SUM_SECONDS, []
    try:
        for rank in ranks:
            lines = rank.communicate(timeout=max(0.0, end - time.monotonic()))[0].splitlines()
            answers.append(lines[-1] if lines else "a rank died")
    except subprocess.TimeoutExpired:
        return f"no sum after {SUM_SECONDS:g} s"
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return next((text for text in answers if text != str(count * (count + 1) / 2)), None)


def add_up(backend: str) -> None:
    """All-reduce `rank + 1` over all ranks, and print the sum or the error; run by each rank."""
    import torch
    import torch.distributed as dist

    from grpo_ustat.terminal.streams import single_line

    try:
        dist.init_process_group(backend)
        device = f"cuda:{dist.get_rank()}" if backend == "nccl" else "cpu"
        number = torch.tensor(dist.get_rank() + 1.0, device=device)
        dist.all_reduce(number)
        print(number.item())
        dist.destroy_process_group()
    except Exception as error:
        print(f"{type(error).__name__}: {single_line(error, 200)}")


def check_trackers(_: Path) -> Finding:
    """Check the installed trackers, and the server and API key of wandb.

    Without a tracker, runs only write files.
    """
    versions = {name: here for name in TRACKERS if (here := installed_version(name))}
    message = (
        ", ".join(f"{name} {here}" for name, here in versions.items()) or "no tracker is installed"
    )
    if "wandb" not in versions:
        return ok(f"{message}; metrics.jsonl contains all metrics")
    mode = os.environ.get("WANDB_MODE", "online")
    if mode != "online":
        return ok(f"{message}; WANDB_MODE={mode}")
    server = os.environ.get("WANDB_BASE_URL", WANDB_SERVER)
    host = urlsplit(server).hostname or ""
    if error := connection_error(server):
        return warning(
            f"{message}; {error}", "export WANDB_MODE=offline, and run `wandb sync` later"
        )
    has_key = bool(os.environ.get("WANDB_API_KEY"))
    with suppress(OSError, netrc.NetrcParseError):
        has_key = has_key or netrc.netrc().authenticators(host) is not None
    if not has_key:
        return warning(
            f"{message}; {host} answers, but no API key is set",
            "run wandb login, or export WANDB_MODE=offline",
        )
    return ok(f"{message}; {host} answers, and an API key is set")


def connection_error(url: str, seconds: float = CONNECT_SECONDS) -> str | None:
    """Return the reason why a server or its proxy cannot be reached; None if it can be reached.

    The connection is made in another thread, because looking up a host name has no time limit.
    """
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    parts = urlsplit(proxy or url)
    port = parts.port or {"http": 80}.get(parts.scheme, 443)

    def connect() -> str:
        try:
            socket.create_connection((parts.hostname or "", port), timeout=seconds).close()
        except OSError as error:
            return error.strerror or str(error) or type(error).__name__
        return ""

    error = answer_within(seconds + 0.5, connect)
    if error is None:
        error = f"no answer in {seconds:g} s"
    return f"{parts.hostname}:{port} cannot be reached ({error})" if error else None


def answer_within(seconds: float, work: Callable[[], Answer]) -> Answer | None:
    """Return the result of `work`, or None after `seconds`; `work` then continues to run."""
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


class Check(NamedTuple):
    """Entry of `CHECKS`."""

    # Name of the check on the command line and in the output.
    name: str
    # Function that returns a finding for an output folder.
    run: Callable[[Path], Finding]
    # Deadline in seconds; longer for checks that import torch, which is slow on slow disks.
    seconds: float


# All checks, with their deadlines in seconds.
CHECKS = tuple(
    Check(run.__name__.removeprefix("check_"), run, seconds)
    for run, seconds in {
        check_code: 20,
        check_packages: 10,
        check_torch: 60,
        check_threads: 10,
        check_memory: 10,
        check_disk: 20,
        check_locks: 20,
        check_cache: 20,
        check_judge: 30,
        check_slurm: 20,
        check_ranks: 100,
        check_trackers: 10,
    }.items()
)
