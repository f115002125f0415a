"""Python and the packages, against the ranges that pyproject.toml gives."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from grpo_ustat import __version__
from grpo_ustat.checkup.findings import Finding, failed, ok, warning
from grpo_ustat.runs.folder import code_state

OWN = "grpo-ustat"
UNKNOWN = warning(
    f"{OWN} runs from its sources without being installed: versions have nothing to be compared to",
    "pip install -c constraints.txt -e .",
)


def code(_: Path) -> Finding:
    """Version and commit of this package."""
    state = code_state()
    commit = f"commit {state['commit'][:10]}" if state["commit"] else "not from a git clone"
    changed = ", with uncommitted changes" if state["diff"] else ""
    return ok(f"grpo_ustat {__version__}, {commit}{changed}")


def python(_: Path) -> Finding:
    """The interpreter's version."""
    try:
        asked = metadata(OWN)["Requires-Python"] or ""
    except PackageNotFoundError:
        return UNKNOWN
    here = platform.python_version()
    said = f"{here} on {platform.system()} {platform.release()} {platform.machine()}"
    if not SpecifierSet(asked).contains(here, prereleases=True):
        return failed(f"{said}, needed is {asked}", f"make an environment with Python {asked}")
    return ok(said)


def packages(_: Path) -> Finding:
    """Everything that is needed, in its range; of extras what is there."""
    try:
        known = [Requirement(text) for text in requires(OWN) or ()]
    except PackageNotFoundError:
        return UNKNOWN
    needed = [one for one in known if one.marker is None or one.marker.evaluate({"extra": ""})]
    wrong = [problem for one in needed for problem in _problems(one)]
    if wrong:
        fix = " ".join(f"'{requirement}'" for requirement, _ in wrong)
        said = ", ".join(f"{one.name} is {there}, needed is {one}" for one, there in wrong)
        return failed(said, f"pip install -c constraints.txt {fix}")
    return _of_extras(known, needed)


def _of_extras(known: list[Requirement], needed: list[Requirement]) -> Finding:
    """What extras ask for is missed only where an older or newer one is there."""
    optional = {str(one): one for one in known if one not in needed}.values()
    there = [one for one in optional if _version(one.name) is not None]
    wrong = [problem for one in there for problem in _problems(one)]
    if wrong:
        said = ", ".join(f"{one.name} is {found}, needed is {one}" for one, found in wrong)
        fix = " ".join(f"'{_plain(one)}'" for one, _ in wrong)
        return warning(f"optional: {said}", f"pip install -c constraints.txt {fix}")
    shown = ("torch", "transformers", "accelerate", "hydra-core", "math-verify")
    named = ", ".join(f"{name} {_version(name)}" for name in shown)
    extras = sorted({one.name for one in there})
    return ok(f"{len(needed)} in range: {named}; optional: {', '.join(extras) or 'none'}")


def _problems(one: Requirement) -> Iterator[tuple[Requirement, str]]:
    """A requirement that is not met, and what is there; also those of the extras that it names."""
    there = _version(one.name)
    if there is None:
        yield _plain(one), "missing"
    elif not one.specifier.contains(there, prereleases=True):
        yield _plain(one), there
    elif one.extras:
        for text in requires(one.name) or ():
            inner = Requirement(text)
            marker = inner.marker
            if marker and any(marker.evaluate({"extra": extra}) for extra in one.extras):
                yield from _problems(inner)


def _plain(one: Requirement) -> Requirement:
    """Without its marker."""
    found = Requirement(str(one))
    found.marker = None
    return found


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
