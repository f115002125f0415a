"""Build the package and run it in empty environments: `check_package.py core cli trl`.

    python scripts/tools/check_package.py [EXTRA ...] [--constraint FILE] [--dist FOLDER] [--tag V]

The script builds the source archive, and then the wheel from the archive. Both must contain exactly
the intended files of the repository. Their metadata must pass `twine check --strict`, and the
description that a package index shows must have no dead link. Then, for each EXTRA (all by
default), the script installs the wheel into an empty environment and runs commands in an empty
folder. `--tag` compares a release tag with the version and the changelog. The exit code is 1 if a
check fails.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEEL = ("grpo_ustat", "conf")
SOURCE = (
    *WHEEL, "docs", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "constraints.txt",
    "pyproject.toml", ".gitignore",
)  # fmt: skip
# Links and paths that do not work outside a checkout.
LEADS_NOWHERE = r"\]\((?!https?://|#)[^)]*\)|\./scripts/|\.venv"

SCALING = """
import numpy as np
import grpo_ustat as gu
draws = np.random.default_rng(0)
scores_PND, useful_PD = draws.normal(size=(40, 16, 30)), draws.normal(size=(40, 30))
rewards_PN = (np.einsum("PND,PD->PN", scores_PND, useful_PD) > 0).astype(float)
centred_PN = (rewards_PN - rewards_PN.mean(axis=1, keepdims=True)) * 16 / 15
gradients_PD = np.einsum("PN,PND->PD", centred_PN, scores_PND) / 16
norms_PN = (scores_PND**2).sum(axis=2)
print(gu.scaling_from_arrays(rewards_PN, norms_PN, gradients_PD @ gradients_PD.T)["gstar"])
"""
# Writes a log of rewards, of rollouts as verl writes them, and of scalars as TRL writes them.
LOGS = """
import json
from pathlib import Path
rows = [{"prompt_id": k // 4, "reward": k % 3 % 2} for k in range(80)]
Path("rewards.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
texts = [{"input": f"q{k // 4}", "output": "a", "score": k % 3 % 2, "step": 3} for k in range(80)]
Path("3.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in texts))
steps = [{"step": k, "reward": 0.5, "frac_reward_zero_std": 0.25} for k in range(1, 41)]
Path("trainer_state.json").write_text(json.dumps({"global_step": 40, "log_history": steps}))
"""
# Packages of the extra [logs] with those that they need.
LOG_PACKAGES = frozenset(
    {"numpy", "scipy", "pyarrow", "PyYAML", "rich", "markdown-it-py", "mdurl", "Pygments"}
)
POLICY = """
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
import grpo_ustat as gu
folder = Path(gu.__file__).parent / "assets/tiny_base"
model = AutoModelForCausalLM.from_pretrained(folder).eval()
tokenizer = AutoTokenizer.from_pretrained(folder)
"""
SCORES = f"""{POLICY}
ids_BT = tokenizer(["3+14=17", "3+14=16"], return_tensors="pt").input_ids
completion_BT = (ids_BT == ids_BT).long()
completion_BT[:, :5] = 0
print(gu.completion_scores(model, ids_BT, ids_BT * 0 + 1, completion_BT).sq_norm_B)
"""
TRAINER = f"""{POLICY}
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from grpo_ustat.integrations.trl import GradientNoiseCallback

def right(completions, answer, **_):
    pairs = zip(completions, answer, strict=True)
    return [float(text.split("####")[-1].strip() == truth) for text, truth in pairs]

sums = [(a, b) for a in range(1, 10) for b in range(1, 20)]
rows = [{{"prompt": f"{{a}}+{{b}}=", "answer": str(a + b)}} for a, b in sums]
trainer = GRPOTrainer(
    model=model, processing_class=tokenizer, reward_funcs=[right],
    train_dataset=Dataset.from_list(rows),
    args=GRPOConfig(
        output_dir="trl", use_cpu=True, bf16=False, per_device_train_batch_size=16,
        gradient_accumulation_steps=4, num_generations=8, max_completion_length=64, max_steps=4,
        report_to=[], disable_tqdm=True, save_strategy="no",
    ),
)
callback = GradientNoiseCallback(trainer, every=1)
trainer.add_callback(callback)
trainer.train()
assert callback.estimate(), "the callback measured nothing"
"""
VERBS = ("train", "mse", "gap", "report", "advise", "convert", "doctor", "sweep")
STEPS = "grpo-ustat train debug=train"


@dataclass(frozen=True)
class Trial:
    """Commands to run after an installation with extras."""

    # Extras to install, such as "cli,lora" in `grpo-ustat[cli,lora]`; "" for none.
    extras: str
    # Words of each command. The first word is a program in the environment.
    commands: tuple[tuple[str, ...], ...]
    # Pattern of a file that the commands must write; "" if no file is checked.
    leaves: str = ""
    # Packages that must be installed, with no others; if empty, this is not checked.
    alone: frozenset[str] = frozenset()
    # Package that needs a version different from the constraints; "" for none.
    unconstrained: str = ""


def words(*lines: str) -> tuple[tuple[str, ...], ...]:
    """Split command lines, which must not contain quotes, into words."""
    return tuple(tuple(line.split()) for line in lines)


TRIALS = {
    "core": Trial("", (("python", "-c", SCALING),), alone=frozenset({"numpy", "scipy"})),
    "logs": Trial(
        "logs",
        (
            ("python", "-c", LOGS),
            *words(
                "grpo-ustat advise rewards.jsonl",
                "grpo-ustat convert 3.jsonl rollouts.parquet",
                "grpo-ustat advise rollouts.parquet",
                "grpo-ustat advise trainer_state.json",
                "grpo-ustat advise 3.jsonl rewards.jsonl num_generations=4",
            ),
        ),
        leaves="rollouts.parquet",
        alone=LOG_PACKAGES,
    ),
    "torch": Trial("torch", (("python", "-c", SCORES),)),
    "trl": Trial("trl", (("python", "-c", TRAINER),)),
    "cli": Trial(
        "cli",
        words(
            "grpo-ustat --version",
            *(f"grpo-ustat {verb} --help" for verb in VERBS),
            "grpo-ustat mse debug=mse",
            "grpo-ustat mse debug=mse objective=trl_dapo",
            f"{STEPS} model=tiny_base",
            "grpo-ustat report runs=outputs/train name=learning",
        ),
        leaves="outputs/report/learning/report.html",
    ),
    "lora": Trial("cli,lora", words(f"{STEPS} lora=r16"), leaves="outputs/**/adapter_config.json"),
    "slurm": Trial("cli,slurm", words(f"{STEPS} hydra/launcher=slurm --cfg hydra")),
    "smollm2": Trial("smollm2", (("python", "-c", "from gguf import GGUFReader"),)),
    "tensorboard": Trial(
        "cli,tensorboard", words(f"{STEPS} logger=tensorboard"), leaves="**/events.out.tfevents.*"
    ),
    "trackio": Trial(
        "cli,trackio", words(f"{STEPS} logger=trackio"), leaves="**/*.db", unconstrained="pillow"
    ),
    "wandb": Trial("cli,wandb", words(f"{STEPS} logger=wandb"), leaves="**/offline-run-*/*.wandb"),
}
# Extras that this script does not test, with the place where they are tested.
OTHERS = {
    "docs": "a separate nightly job builds the documentation site from a checkout",
    "test": "the tests run in a checkout",
    "vllm": "scripts/tools/try_vllm.py tests vLLM on CPUs; this extra downloads gigabytes for GPUs",
}


class Failure(Exception):
    """Fault of the package, described in one line, possibly followed by a program's output."""


def run(command: list[str], **options) -> str:
    """Return a program's standard output; on failure, raise the end of its output."""
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode:
        output = done.stdout[-2000:] + done.stderr[-2000:]
        raise Failure(f"{' '.join(command)[:200]} ended with code {done.returncode}:\n{output}")
    return done.stdout


def environment(folder: Path, *wanted: str) -> Path:
    """Make an environment with these requirements; return the folder that contains its programs."""
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
    # With -q, pip would not explain version conflicts.
    run([*pip, "install", *wanted], cwd=folder)
    run([*pip, "check"], cwd=folder)
    return folder / "bin"


def built(folder: Path, scratch: Path) -> tuple[Path, Path]:
    """Build the source archive, and the wheel from the archive."""
    folder.mkdir(parents=True, exist_ok=True)
    if left := [path.name for path in folder.iterdir()]:
        raise Failure(
            f"{folder} must be empty, but contains {left[0]}: choose another folder with --dist"
        )
    python = str(environment(scratch / "builder", "build", "twine") / "python")
    output = run([python, "-m", "build", "--outdir", str(folder), str(ROOT)])
    if "warning" in output.lower():
        raise Failure(f"the build warns:\n{output}")
    (archive,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    run([python, "-m", "twine", "check", "--strict", str(archive), str(wheel)])
    return archive, wheel


def tracked(*tops: str) -> set[str]:
    """List the repository's files below some folders, including files not yet committed."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *tops]
    return set(run(listed, cwd=ROOT).splitlines())


def check_contents(archive: Path, wheel: Path) -> None:
    """Check that the archive and the wheel contain exactly the intended files."""
    with tarfile.open(archive) as opened:
        source = {name.partition("/")[2] for name in opened.getnames()} - {"PKG-INFO"}
    with zipfile.ZipFile(wheel) as opened:
        code = {name for name in opened.namelist() if ".dist-info/" not in name}
    wanted = {re.sub("^conf/", "grpo_ustat/conf/", name) for name in tracked(*WHEEL)}
    for file, held, due in ((archive, source, tracked(*SOURCE)), (wheel, code, wanted)):
        if held != due:
            lacks, more = sorted(due - held)[:5], sorted(held - due)[:5]
            raise Failure(f"{file.name} lacks {lacks} and should not have {more}")
        print(f"{file.name}: {len(held)} files, {file.stat().st_size / 1e6:.1f} MB")


def metadata_of(wheel: Path) -> Message:
    """Return the wheel's metadata; the payload is the description."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(opened.read(name))


def check_metadata(metadata: Message, tag: str) -> None:
    """Check that the description has no dead links and that the tag matches the version."""
    description = bytes(metadata.get_payload(decode=True)).decode()
    if match := re.search(LEADS_NOWHERE, description):
        line = next(x for x in description.splitlines() if match[0] in x)
        raise Failure(
            f"the description contains {match[0]!r}, which does not work on a package index's "
            f"page: {line}"
        )
    version, changelog = metadata["Version"], (ROOT / "CHANGELOG.md").read_text()
    if tag and tag != f"v{version}":
        raise Failure(
            f"the tag is {tag}, but the version is {version}: set the version in "
            "grpo_ustat/__init__.py"
        )
    if tag and f"\n## [{version}]" not in changelog:
        raise Failure(f"CHANGELOG.md has no section [{version}]: rename the section Unreleased")


def try_out(trial: Trial, wheel: Path, constraints: list[Path], scratch: Path) -> str:
    """Install the wheel and run the commands; return a line with the packages and the times."""
    limits = []
    for number, file in enumerate(constraints):
        kept = scratch / f"constraints-{number}.txt"
        lines = file.read_text().splitlines(keepends=True)
        kept.write_text("".join(x for x in lines if x.split("==")[0] != trial.unconstrained))
        limits += ["-c", str(kept)]
    start = time.monotonic()
    wanted = f"{wheel}[{trial.extras}]" if trial.extras else str(wheel)
    programs = environment(scratch / "environment", *limits, wanted)
    installed = time.monotonic()
    listed = run([str(programs / "python"), "-m", "pip", "freeze"], cwd=scratch).splitlines()
    came = {re.split("[= ]", line)[0] for line in listed} - {"grpo-ustat"}
    versions = [line for line in listed if line.startswith(("torch==", "transformers==", "trl=="))]
    if trial.alone and came != trial.alone:
        raise Failure(f"{sorted(came)} were installed, but only {sorted(trial.alone)} should be")
    place = scratch / "empty"
    place.mkdir()
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {
        "HOME": str(place), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline",
    }  # fmt: skip
    begun = time.monotonic()
    for program, *arguments in trial.commands:
        run([str(programs / program), *arguments], cwd=place, env=variables)
    if trial.leaves and not any(place.glob(trial.leaves)):
        raise Failure(f"{' '.join(trial.commands[-1])} wrote no file {trial.leaves}")
    times = f"installed in {installed - start:.0f} s, ran in {time.monotonic() - begun:.0f} s"
    return ", ".join([f"{len(came)} packages", *versions, times])


def main() -> int:
    """Check the package, and return the exit code."""
    first = " ".join((__doc__ or "").split("\n\n")[0].split())
    parser = argparse.ArgumentParser(description=first)
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=f"of {', '.join(TRIALS)}")
    parser.add_argument("--constraint", type=Path, action="append", default=[], help="as of pip")
    parser.add_argument(
        "--dist", type=Path, help="folder in which the archive and the wheel are kept"
    )
    parser.add_argument("--tag", default="", help="tag of a release, compared with the version")
    options = parser.parse_args()
    if unknown := set(options.extras) - TRIALS.keys():
        parser.error(f"unknown EXTRA {sorted(unknown)}: choose from {', '.join(TRIALS)}")
    constraints = [path.resolve() for path in options.constraint]
    failed = False
    with tempfile.TemporaryDirectory() as name:
        try:
            archive, wheel = built(options.dist or Path(name) / "dist", Path(name))
            check_contents(archive, wheel)
            check_metadata(metadata_of(wheel), options.tag)
        except Failure as failure:
            print(f"failed: {failure}", file=sys.stderr)
            return 1
        for extra in options.extras or TRIALS:
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    summary = try_out(TRIALS[extra], wheel.resolve(), constraints, Path(scratch))
                    print(f"{extra}: {summary}", flush=True)
                except Failure as failure:
                    print(f"{extra}: failed: {failure}", file=sys.stderr, flush=True)
                    failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
