"""Python and packages in their ranges; the hub's caches, the judge of answers, the trackers.

What a check alone needs is imported in it, so that a missing package is told by `packages`.
"""

from __future__ import annotations

import json
import netrc
import os
import platform
import re
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from grpo_ustat import __version__
from grpo_ustat.doctor.runner import Finding, answer_within, failed, ok, warning

PACKAGE = "grpo-ustat"
COMMAND_EXTRAS = ("", "torch", "cli")  # extras that every command needs
NOT_INSTALLED = warning(
    f"{PACKAGE} runs from its sources without being installed: versions have nothing to be "
    "compared to",
    "pip install -c constraints.txt -e '.[cli]'",
)
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
JUDGE_DEADLINE, JUDGE_MEMORY_GB = 2.0, 2.0  # as in conf/dataset/math.yaml
JUDGE_SPARE_SECONDS = 3.0  # seconds beside the deadline, on a busy machine
RIGHT_PAIR = (r"\boxed{\frac{1}{2}}", r"\boxed{0.5}")
WRONG_PAIR = (r"\boxed{\frac{1}{2}}", r"\boxed{0.25}")
ENDLESS_PAIR = (r"\boxed{7}", r"\boxed{9^{9^{9^9}}}")
JUDGE_FIX = (
    "pip install -c constraints.txt 'math-verify[antlr4-9-3]'; sets without dataset=math do "
    "without it"
)
CONNECT_DEADLINE = 2.0  # seconds
TRACKERS = ("wandb", "tensorboard", "trackio")
WANDB_SERVER = "https://api.wandb.ai"


def code(_: Path) -> Finding:
    """Version and commit of this package."""
    from grpo_ustat.runs.folder import code_state

    state = code_state()
    commit = f"commit {state['commit'][:10]}" if state["commit"] else "not from a git clone"
    changes = ", with uncommitted changes" if state["diff"] else ""
    return ok(f"grpo_ustat {__version__}, {commit}{changes}")


def python(_: Path) -> Finding:
    """The interpreter's version."""
    try:
        supported = metadata(PACKAGE).get("Requires-Python", "")  # pyright: ignore[reportAttributeAccessIssue]  # typed since 3.12
    except PackageNotFoundError:
        return NOT_INSTALLED
    own = platform.python_version()
    message = f"{own} on {platform.system()} {platform.release()} {platform.machine()}"
    if not SpecifierSet(supported).contains(own, prereleases=True):
        return failed(
            f"{message}, needed is {supported}", f"make an environment with Python {supported}"
        )
    return ok(message)


def packages(_: Path) -> Finding:
    """Required packages are installed and in range; extras only where they are installed."""
    try:
        declared = [Requirement(text) for text in requires(PACKAGE) or ()]
    except PackageNotFoundError:
        return NOT_INSTALLED
    declared = [one for one in declared if one.name != PACKAGE]  # [cli] holds [torch]
    needed = [
        one for one in declared
        if one.marker is None or any(one.marker.evaluate({"extra": x}) for x in COMMAND_EXTRAS)
    ]  # fmt: skip
    optional = {str(one): one for one in declared if one not in needed}.values()
    installed = [one for one in optional if _installed_version(one.name) is not None]
    for level, prefix, group in ((failed, "", needed), (warning, "optional: ", installed)):
        if problems := [problem for one in group for problem in _problems(one)]:
            message = ", ".join(f"{one.name} is {own}, needed is {one}" for one, own in problems)
            fix = " ".join(f"'{requirement}'" for requirement, _ in problems)
            return level(prefix + message, f"pip install -c constraints.txt {fix}")
    names = ("torch", "transformers", "accelerate", "hydra-core", "math-verify")
    versions = ", ".join(f"{name} {_installed_version(name)}" for name in names)
    extras = ", ".join(sorted({one.name for one in installed})) or "none"
    return ok(f"{len(needed)} in range: {versions}; optional: {extras}")


def _problems(requirement: Requirement) -> Iterator[tuple[Requirement, str]]:
    """A requirement that is not met, without its marker, beside the installed version; also those
    of the extras that it names.
    """
    own = _installed_version(requirement.name)
    if own is None or not requirement.specifier.contains(own, prereleases=True):
        bare = Requirement(str(requirement))
        bare.marker = None
        yield bare, own or "missing"
    elif requirement.extras:
        for text in requires(requirement.name) or ():
            inner = Requirement(text)
            marker = inner.marker
            if marker and any(marker.evaluate({"extra": extra}) for extra in requirement.extras):
                yield from _problems(inner)


def _installed_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cache(_: Path) -> Finding:
    """Models and data sets of `conf/` in the hub's caches; without a network they must be there."""
    from huggingface_hub import constants

    from grpo_ustat.config.model import cache_folder

    models = _hub_ids("model", ("model_name_or_path",))
    datasets = _hub_ids("dataset", ("path", "test_path"))
    lacking_models = [name for name in models if not _has_model(name)]
    lacking_datasets = [name for name in datasets if not _has_dataset(name)]
    stored = [x for x in models + datasets if x not in (*lacking_models, *lacking_datasets)]
    made = sorted(f"cached:{path.parent.name}" for path in cache_folder().glob("*/config.json"))
    offline = constants.HF_HUB_OFFLINE
    message = (
        f"HF_HOME={constants.HF_HOME}, HF_HUB_OFFLINE {'' if offline else 'not '}set; "
        f"here: {', '.join([*stored, *made]) or 'none'}"
    )
    if not lacking_models and not lacking_datasets:
        return ok(message)
    message += f"; not here: {', '.join([*lacking_models, *lacking_datasets])}"
    error = None if offline else connection_error(constants.ENDPOINT)
    if not offline and error is None:
        return ok(f"{message}, fetched when first used")
    if lacking_models:
        command = f"hf download {lacking_models[0]}"
    else:
        command = f'python -c "import datasets; datasets.load_dataset({lacking_datasets[0]!r})"'
    return warning(
        f"{message}{f'; {error}' if error else ''}: embedded models and generated arithmetic run",
        f"where there is a network: {command}; then copy HF_HOME, or set "
        "model.model_name_or_path and dataset.path to folders",
    )


def _hub_ids(group: str, keys: Sequence[str]) -> list[str]:
    """Hub ids in the configuration files of a group, each once."""
    import yaml

    from grpo_ustat.config.folders import CONF

    contents = [yaml.safe_load(file.read_text()) for file in sorted((CONF / group).glob("*.yaml"))]
    values = [(content or {}).get(key) for content in contents for key in keys]
    return list(dict.fromkeys(x for x in values if x and HUB_ID.fullmatch(str(x))))


def _has_model(name: str) -> bool:
    """Whether its configuration, tokenizer and every file of its weights are in the cache."""
    from huggingface_hub import try_to_load_from_cache

    config, tokenizer = (
        try_to_load_from_cache(name, file) for file in ("config.json", "tokenizer_config.json")
    )
    if not isinstance(config, str) or not isinstance(tokenizer, str):
        return False
    folder = Path(config).parent
    if (folder / "model.safetensors").is_file():
        return True
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return False
    parts = set(json.loads(index.read_text())["weight_map"].values())
    return all((folder / part).is_file() for part in parts)


def _has_dataset(name: str) -> bool:
    """Whether the library `datasets` has loaded it before; its folder's name has other cases and
    dashes than the data set's.
    """
    from huggingface_hub import constants

    def normalised(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower())

    home = os.environ.get("HF_DATASETS_CACHE", os.path.join(constants.HF_HOME, "datasets"))
    folders = {normalised(path.name): path for path in Path(home).glob("*") if path.is_dir()}
    folder = folders.get(normalised(name.replace("/", "___")))
    return folder is not None and any(folder.rglob("*.arrow"))


def judge(_: Path) -> Finding:
    """Verdicts of the real judge in its own process, and the time of killing one."""
    from grpo_ustat.tasks.verifier import GRACE_SECONDS, JudgeError, Verdict, Verifier

    verifier = Verifier(1, JUDGE_DEADLINE, JUDGE_MEMORY_GB)
    try:
        right, wrong = verifier.judge([RIGHT_PAIR, WRONG_PAIR])
        start = time.monotonic()
        endless, seconds = verifier.judge([ENDLESS_PAIR])[0], time.monotonic() - start
    except JudgeError as error:
        return failed(str(error), JUDGE_FIX)
    finally:
        verifier.close()
    if (right, wrong) != (Verdict.RIGHT, Verdict.WRONG):
        return failed(
            f"a right answer was judged {right.value}, a wrong one {wrong.value}", JUDGE_FIX
        )
    latest = JUDGE_DEADLINE + GRACE_SECONDS + JUDGE_SPARE_SECONDS
    if endless in (Verdict.RIGHT, Verdict.WRONG) or seconds > latest:
        return failed(
            f"an answer that never ends was judged {endless.value} after {seconds:.1f} s, the "
            f"deadline is {JUDGE_DEADLINE:g} s",
            "report it; do not train with dataset=math here",
        )
    return ok(f"right, wrong; an answer that never ends was stopped after {seconds:.1f} s")


def trackers(_: Path) -> Finding:
    """Trackers that are installed; none is needed, as a run's own files hold everything."""
    versions = {name: own for name in TRACKERS if (own := _installed_version(name))}
    message = ", ".join(f"{name} {own}" for name, own in versions.items()) or "none installed"
    if "wandb" not in versions:
        return ok(f"{message}; metrics.jsonl has everything")
    mode = os.environ.get("WANDB_MODE", "online")
    if mode != "online":
        return ok(f"{message}; WANDB_MODE={mode}")
    server = os.environ.get("WANDB_BASE_URL", WANDB_SERVER)
    host = urlsplit(server).hostname or ""
    error = connection_error(server)
    if error is not None:
        return warning(f"{message}; {error}", "export WANDB_MODE=offline, later `wandb sync`")
    has_key = bool(os.environ.get("WANDB_API_KEY"))
    if not has_key:
        with suppress(OSError, netrc.NetrcParseError):
            has_key = netrc.netrc().authenticators(host) is not None
    if not has_key:
        return warning(
            f"{message}; {host} answers, but there is no key",
            "wandb login, or export WANDB_MODE=offline",
        )
    return ok(f"{message}; {host} answers, there is a key")


def connection_error(url: str, seconds: float = CONNECT_DEADLINE) -> str | None:
    """Why a server, or the proxy before it, cannot be reached; None where it can.

    Looking up a name knows no deadline of its own.
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
