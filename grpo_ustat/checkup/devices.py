"""Devices that torch sees, and whether they compute what they should."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import torch
from rich.filesize import decimal

from grpo_ustat.checkup.findings import Finding, failed, ok, warning

SIZE = 256
WRONG = 1e-3  # relative error of a float32 product against float64; TF32's is 3e-4
BF16 = (3e-4, 2e-2)  # between these lies that of a product in bfloat16, which has 8 bits


def torch_devices(_: Path) -> Finding:
    """GPUs by name, memory and driver; each multiplies two matrices."""
    if not torch.cuda.is_available():
        return _without_gpu()
    names = []
    for number in range(torch.cuda.device_count()):
        device, about = f"cuda:{number}", torch.cuda.get_device_properties(number)
        error = _error(device, torch.float32)
        if not error < WRONG:
            return failed(
                f"{device} ({about.name}) multiplies matrices with a relative error of {error:.2g}",
                "take another GPU (CUDA_VISIBLE_DEVICES), and have this one looked at",
            )
        free, total = torch.cuda.mem_get_info(number)
        names.append(f"{device} {about.name}, {decimal(free)} of {decimal(total)} free")
    driver = _nvidia_smi("driver_version") or "unknown"
    return ok(
        f"{torch.__version__}, CUDA {torch.version.cuda}, driver {driver}: {'; '.join(names)}"
    )


def _without_gpu() -> Finding:
    said, driver = f"{torch.__version__}, CPU only", _nvidia_smi("driver_version")
    error = _error("cpu", torch.float32)
    if not error < WRONG:
        return failed(
            f"{said}, and it multiplies matrices with a relative error of {error:.2g}",
            "install torch again",
        )
    if driver is None:
        return ok(f"{said}: launch.device=cpu")
    if torch.version.cuda is None:
        fix = "install a torch with CUDA (https://pytorch.org), without -c constraints.txt"
        return warning(f"{said}, but this machine has a GPU (driver {driver})", fix)
    return failed(
        f"{said}: it cannot use this machine's GPU, it is built for CUDA {torch.version.cuda} and "
        f"the driver is {driver}",
        "a newer driver, or a torch for an older CUDA; CUDA_VISIBLE_DEVICES must not be empty",
    )


def _nvidia_smi(field: str) -> str | None:
    """Of the first GPU; None where the program is not there or sees none."""
    if shutil.which("nvidia-smi") is None:
        return None
    words = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout else None


def bf16(_: Path) -> Finding:
    """A product in bfloat16 on every kind of device, against the same in float64."""
    devices, said = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])], []
    for device in devices:
        error = _error(device, torch.bfloat16)
        said.append(f"{device} computes with a relative error of {error:.1e}")
        if not BF16[0] < error < BF16[1]:
            return failed(
                f"{said[-1]}, which is not bfloat16's 2e-3",
                "bf16=false and model.dtype=float32",
            )
    if "cuda" in devices and not torch.cuda.is_bf16_supported(including_emulation=False):
        return warning(f"{', '.join(said)}; this GPU only emulates it", "bf16=false is faster")
    return ok(", ".join(said))


def _error(device: str, dtype: torch.dtype) -> float:
    """Relative error of a matrix product in autocast or float32, nan where one is not finite."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64) for _ in range(2))
    with torch.no_grad(), torch.autocast(device, dtype, enabled=dtype is not torch.float32):
        found = (a.float().to(device) @ b.float().to(device)).double().cpu()
    exact = a.float().double() @ b.float().double()
    return float((found - exact).norm() / exact.norm())
