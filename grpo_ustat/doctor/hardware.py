"""GPUs, arithmetic, attention, cores and memory of this machine.

torch and transformers are imported where a check needs them, so that cores and memory are told
where those are missing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_ustat.doctor.runner import Finding, failed, ok, warning

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

CUDA_DEADLINE = 20.0  # seconds; importing torch and starting CUDA takes 5
MATRIX_SIZE = 256
FLOAT32_ERROR = 1e-3  # the largest relative error of a float32 product; TF32's is 3e-4
BF16_ERROR = (3e-4, 2e-2)  # that of a product in bfloat16, which has 8 bits, lies between these
LOGIT_ERROR = 1e-3  # the largest, in units of the largest logit; float32 on a CPU has 1e-6
PADDING_TOKENS, TEXT_TOKENS = 5, 12  # tokens
CGROUP = Path("/sys/fs/cgroup")
ENOUGH_FREE_BYTES = 4e9  # a small model trains within
LEAST_FREE_BYTES = 1e9  # torch loads in no less


def torch_devices(_: Path) -> Finding:
    """GPUs by name, memory and driver; each device multiplies two matrices."""
    import torch
    from rich.filesize import decimal

    driver = _gpu_driver()
    if error := cuda_error():
        return failed(
            f"{torch.__version__}, CUDA {torch.version.cuda}: {error}",
            "see dmesg and nvidia-smi: the GPU or its driver may need a restart",
        )
    if torch.cuda.is_available():
        names = []
        for number in range(torch.cuda.device_count()):
            device, properties = f"cuda:{number}", torch.cuda.get_device_properties(number)
            error = _product_error(device, torch.float32)
            if not error < FLOAT32_ERROR:
                return failed(
                    f"{device} ({properties.name}) multiplies matrices with a relative error of "
                    f"{error:.2g}",
                    "take another GPU (CUDA_VISIBLE_DEVICES), and have this one looked at",
                )
            free, total = torch.cuda.mem_get_info(number)
            names.append(f"{device} {properties.name}, {decimal(free)} of {decimal(total)} free")
        return ok(
            f"{torch.__version__}, CUDA {torch.version.cuda}, driver {driver or 'unknown'}: "
            f"{'; '.join(names)}"
        )
    message = f"{torch.__version__}, CPU only"
    error = _product_error("cpu", torch.float32)
    if not error < FLOAT32_ERROR:
        return failed(
            f"{message}, and it multiplies matrices with a relative error of {error:.2g}",
            "install torch again",
        )
    if driver is None:
        return ok(f"{message}: launch.device=cpu")
    if torch.version.cuda is None:
        fix = "install a torch with CUDA (https://pytorch.org), without -c constraints.txt"
        return warning(f"{message}, but this machine has a GPU (driver {driver})", fix)
    return failed(
        f"{message}: it cannot use this machine's GPU, it is built for CUDA {torch.version.cuda} "
        f"and the driver is {driver}",
        "a newer driver, or a torch for an older CUDA; CUDA_VISIBLE_DEVICES must not be empty",
    )


@cache
def cuda_error() -> str | None:
    """Why CUDA does not start; None where it does, and without a CUDA or a GPU.

    A start that hangs or crashes would take this process with it, so another one tries.
    """
    import torch

    if torch.version.cuda is None or shutil.which("nvidia-smi") is None:
        return None
    code = "import torch; torch.cuda.is_available() and torch.cuda.init()"
    try:
        process = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, timeout=CUDA_DEADLINE
        )
    except subprocess.TimeoutExpired:
        return f"its start did not answer in {CUDA_DEADLINE:g} s"
    return f"its start ends with code {process.returncode}" if process.returncode else None


def _devices() -> list[str]:
    """Kinds of devices that torch can use."""
    import torch

    return ["cpu", *(["cuda"] if cuda_error() is None and torch.cuda.is_available() else [])]


def _gpu_driver() -> str | None:
    """Version of the first GPU's driver; None where nvidia-smi is missing or sees no GPU."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = process.stdout.strip().splitlines()
    return lines[0] if process.returncode == 0 and lines else None


def bf16(_: Path) -> Finding:
    """A product in bfloat16 on every kind of device, against the same in float64."""
    import torch

    messages = []
    for device in _devices():
        error = _product_error(device, torch.bfloat16)
        messages.append(f"{device} computes with a relative error of {error:.1e}")
        if not BF16_ERROR[0] < error < BF16_ERROR[1]:
            return failed(
                f"{messages[-1]}, which is not bfloat16's 2e-3",
                "bf16=false and model.dtype=float32",
            )
    message = ", ".join(messages)
    if "cuda" in _devices() and not torch.cuda.is_bf16_supported(including_emulation=False):
        return warning(f"{message}; this GPU only emulates it", "bf16=false is faster")
    return ok(message)


def _product_error(device: str, dtype: torch.dtype) -> float:
    """Relative error of a matrix product in autocast or float32; NaN where one is not finite."""
    import torch

    generator = torch.Generator().manual_seed(0)
    size = (MATRIX_SIZE, MATRIX_SIZE)
    a, b = (torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(2))
    with torch.no_grad(), torch.autocast(device, dtype, enabled=dtype is not torch.float32):
        product = (a.float().to(device) @ b.float().to(device)).double().cpu()
    exact = a.float().double() @ b.float().double()
    return float((product - exact).norm() / exact.norm())


def attention(_: Path) -> Finding:
    """A random model of two layers on every kind of device: eager against sdpa, padded or not."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    messages = []
    for device in _devices():
        between_kernels, by_padding = _logit_errors(
            attention_model("eager").to(device),  # pyright: ignore[reportArgumentType]  # `to` is
            attention_model("sdpa").to(device),  # pyright: ignore[reportArgumentType]  # wrapped
        )
        if not between_kernels < LOGIT_ERROR:
            return failed(
                f"sdpa and eager differ by {between_kernels:.1e} of the largest logit on {device}",
                "model.attn_implementation=eager",
            )
        if not by_padding < LOGIT_ERROR:
            return failed(
                f"left padding moves sdpa's logits by {by_padding:.1e} of the largest on {device}",
                "model.attn_implementation=eager, rollout_batch_size=1 if that is wrong too",
            )
        messages.append(
            f"{device}: sdpa = eager within {between_kernels:.0e}, left padding within "
            f"{by_padding:.0e}"
        )
    flash = importlib.util.find_spec("flash_attn") is not None
    return ok("; ".join(messages) + f"; flash_attn {'is' if flash else 'not'} installed")


def attention_model(attn_implementation: str) -> PreTrainedModel:
    """A random Qwen2 of two layers, the same weights for every kind of attention."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5,
    )  # fmt: skip
    config._attn_implementation = attn_implementation
    return Qwen2ForCausalLM(config).eval()


def _logit_errors(eager: PreTrainedModel, sdpa: PreTrainedModel) -> tuple[float, float]:
    """Largest differences of logits, in units of the largest logit.

    Returns:
        Between both models in a batch with left padding; of sdpa between a padded row and the
        same row alone.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(1, 50, (1, TEXT_TOKENS), generator=generator).to(eager.device)
    short = whole[:, PADDING_TOKENS:]
    batch = torch.cat([whole, torch.cat([whole.new_zeros(1, PADDING_TOKENS), short], dim=1)])
    mask = torch.ones_like(batch)
    mask[1, :PADDING_TOKENS] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    inputs = dict(input_ids=batch, attention_mask=mask, position_ids=positions)
    with torch.no_grad():
        logits_eager, logits_sdpa = eager(**inputs).logits, sdpa(**inputs).logits
        logits_alone = sdpa(input_ids=short).logits[0]
    scale = float(logits_alone.abs().max())
    between_kernels = float(((logits_eager - logits_sdpa) * mask[..., None]).abs().max()) / scale
    return between_kernels, float(
        (logits_sdpa[1, PADDING_TOKENS:] - logits_alone).abs().max()
    ) / scale


def threads(_: Path) -> Finding:
    """OMP_NUM_THREADS against the cores that this process may use: affinity, container, SLURM."""
    affinity = getattr(os, "sched_getaffinity", None)
    limits = [(len(affinity(0)) if affinity else os.cpu_count() or 1, "of this process")]
    quota = _text(CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        limits.append((max(1, int(quota[0]) // int(quota[1])), "of the container"))
    task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if task.isdecimal():
        limits.append((int(task), "SLURM_CPUS_PER_TASK"))
    cores, reason = min(limits, key=lambda limit: limit[0])
    setting = os.environ.get("OMP_NUM_THREADS")
    message = f"{cores} cores ({reason}), OMP_NUM_THREADS={setting or 'unset'}"
    if setting is None:
        return ok(f"{message}; launch.num_threads decides in runs")
    if not setting.isdecimal() or int(setting) < 1:
        return failed(f"{message} is no number of threads", "export OMP_NUM_THREADS=1")
    if int(setting) > cores:
        return warning(
            f"{message}: threads that wait for each other's core are far slower than one",
            f"export OMP_NUM_THREADS={cores} or less; with several ranks, cores / ranks",
        )
    return ok(message)


def memory(_: Path) -> Finding:
    """Free memory of the machine, or of what a container grants."""
    import psutil
    from rich.filesize import decimal

    machine = psutil.virtual_memory()
    free, total = machine.available, f"{decimal(machine.total)} in all"
    limit, used = (_text(CGROUP / f"memory.{name}").strip() for name in ("max", "current"))
    if limit.isdecimal() and used.isdecimal() and int(limit) - int(used) < free:
        free, total = int(limit) - int(used), f"{decimal(int(limit))} granted by the container"
    message = f"{decimal(max(0, free))} free of {total}"
    if free < LEAST_FREE_BYTES:
        return failed(message, "end other programs, or ask for more memory (SLURM: --mem)")
    if free < ENOUGH_FREE_BYTES:
        return warning(message, "more than the embedded policies may not fit; dry_run=true says")
    return ok(message)


def _text(file: Path) -> str:
    """A file's text, empty where it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
