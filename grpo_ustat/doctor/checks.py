"""Checks of `grpo-ustat doctor`; each is a function of the output folder.

Each check imports its packages itself, so that a missing package does not break other checks.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from grpo_ustat import __version__
from grpo_ustat.config.command_line import install_line, is_installed

Answer = TypeVar("Answer")
# Extras of this package that every command needs; "" stands for the base requirements.
COMMAND_EXTRAS = ("", "torch", "cli")
SUBMITIT_PLUGIN = "hydra_plugins.hydra_submitit_launcher"
MIN_DISK_BYTES = 5e9
OTHER_FOLDER = "choose another folder: --output DIR for this command, hydra.run.dir=DIR for runs"
# Deadline and memory limit of an answer judge, as in conf/dataset/math.yaml, and extra seconds that
# are allowed on busy machines.
JUDGE_SECONDS, JUDGE_MEMORY_GB, JUDGE_SPARE_SECONDS = 2.0, 2.0, 4.0
JUDGE_FIX = "pip install -c constraints.txt 'math-verify[antlr4-9-3]'; only dataset=math needs it"


class Finding(NamedTuple):
    """Result of a check."""

    # `warning`: runs work, but a setting is probably a mistake. `failed`: runs will fail or give
    # wrong results.
    status: Literal["ok", "warning", "failed"]
    message: str
    # Suggested fix; empty if the status is ok.
    fix: str = ""


def check_versions(_: Path) -> Finding:
    """Report versions, and check that those of required packages are in range."""
    from packaging.requirements import Requirement

    python = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    message = f"grpo_ustat {__version__}, {python}"
    try:
        declared = [Requirement(text) for text in requires("grpo-ustat") or ()]
    except PackageNotFoundError:
        fix = "pip install -c constraints.txt -e '.[cli]'"
        return Finding("warning", f"{message}, not installed: packages cannot be checked", fix)
    wrong: dict[str, str] = {}
    for one in declared:
        marker, one.marker = one.marker, None
        if marker is None or any(marker.evaluate({"extra": x}) for x in COMMAND_EXTRAS):
            here = installed_version(one.name)
            if here is None or not one.specifier.contains(here, prereleases=True):
                wrong[str(one)] = f"{one.name} is {here or 'missing'}, but {one} is needed"
    if wrong:
        fix = f"pip install -c constraints.txt {' '.join(map(repr, wrong))}"
        return Finding("failed", ", ".join(wrong.values()), fix)
    names = ("torch", "transformers", "accelerate", "hydra-core", "math-verify", "trl", "vllm")
    versions = [f"{name} {here}" for name in names if (here := installed_version(name))]
    return Finding("ok", ", ".join([message, *versions]))


def installed_version(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_device(_: Path) -> Finding:
    """List the GPUs that torch can use; fail if there is a GPU that it cannot use."""
    import torch

    message = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        names = "; ".join(f"{gpu.name}, {gpu.total_memory / 1e9:.0f} GB" for gpu in gpus)
        return Finding("ok", f"{message}: {names}")
    if shutil.which("nvidia-smi") is None:
        return Finding("ok", f"{message}: launch.device=cpu")
    if torch.version.cuda is None:
        fix = "install a torch with CUDA (https://pytorch.org), without -c constraints.txt"
        return Finding("warning", f"{message}, but this machine has a GPU", fix)
    fix = "update the driver, or install a torch for an older CUDA; check CUDA_VISIBLE_DEVICES"
    return Finding("failed", f"{message} cannot use this machine's GPU", fix)


def check_disk(folder: Path) -> Finding:
    """Check free space in the output folder, or in the parent that would contain it, and write."""
    from rich.filesize import decimal

    place = folder.absolute()
    while not place.exists():
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
        with tempfile.NamedTemporaryFile(dir=place, prefix=".grpo_ustat-") as file:
            file.write(b"\0" * 2**20)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        text = f"{place} cannot be written: {error.strerror or error}"
        return Finding("failed", text, OTHER_FOLDER)
    message = f"{decimal(free)} free in {place}"
    if free < MIN_DISK_BYTES:
        fix = f"estimate a run's disk use with dry_run=true, or {OTHER_FOLDER}"
        return Finding("warning", message, fix)
    return Finding("ok", message)


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
    if here or not offline:
        return Finding("ok", message)
    return Finding(
        "warning",
        f"{message}: only embedded models and generated arithmetic are available",
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
        return Finding("failed", str(error), JUDGE_FIX)
    finally:
        verifier.close()
    if verdict in JUDGED_VERDICTS or seconds > JUDGE_SECONDS + JUDGE_SPARE_SECONDS:
        return Finding(
            "failed",
            f"an answer that takes forever to judge was judged {verdict.value} after {seconds:.1f} "
            f"s, but the deadline is {JUDGE_SECONDS:g} s",
            "report this as a bug, and do not train with dataset=math on this machine",
        )
    return Finding("ok", f"the judge works, and stopped an endless answer after {seconds:.1f} s")


def check_slurm(_: Path) -> Finding:
    """Ping SLURM's controller, and check for the launcher that submits sweeps."""
    job = os.environ.get("SLURM_JOB_ID")
    place = f"inside job {job}" if job else "outside a job"
    if shutil.which("scontrol") is None:
        if not job:
            return Finding("ok", "SLURM is not on this machine")
        fix = "add SLURM's commands to the job's PATH (in a container: bind them)"
        return Finding("warning", f"{place}, without scontrol: a run cannot be requeued", fix)
    process = subprocess.run(["scontrol", "ping"], capture_output=True, text=True)
    answer = " ".join((process.stdout + process.stderr).split())[:200] or "an empty answer"
    if process.returncode or "UP" not in answer:
        fix = "ask the cluster's administrator"
        return Finding("failed" if job else "warning", f"{place}, scontrol ping: {answer}", fix)
    if not is_installed(SUBMITIT_PLUGIN):
        text = f"{place}, SLURM is up; hydra/launcher=slurm needs hydra-submitit-launcher"
        return Finding("warning", text, install_line("slurm"))
    return Finding("ok", f"{place}, SLURM is up, and hydra/launcher=slurm is available")


def answer_within(seconds: float, work: Callable[[], Answer]) -> Answer | None:
    """Return the result of `work`, or None after `seconds`; `work` then continues to run."""
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


# All checks, each with a deadline in seconds. Importing torch is slow on slow disks.
CHECKS: dict[Callable[[Path], Finding], float] = {
    check_versions: 20,
    check_device: 60,
    check_disk: 20,
    check_cache: 20,
    check_judge: 30,
    check_slurm: 20,
}
