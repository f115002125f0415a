"""Files of the repository that no command reads: they parse, and say what is so."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

import grpo_ustat

ROOT = Path(__file__).parents[1]


def read(name):
    return yaml.safe_load((ROOT / name).read_text())


def test_continuous_integration_runs_what_a_person_runs():
    workflow = read(".github/workflows/ci.yml")
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML reads the key `on` as true
    job = workflow["jobs"]["test"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci/run").stat().st_mode & 0o100
    lowest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert lowest in job["strategy"]["matrix"]["python"]


def test_the_nightly_job_runs_what_a_push_leaves_out_and_the_living_packages():
    workflow = read(".github/workflows/nightly.yml")
    assert workflow[True]["schedule"] and "push" not in workflow[True]
    steps = {
        name: "\n".join(step["run"] for step in job["steps"] if "run" in step)
        for name, job in workflow["jobs"].items()
    }
    assert ".ci/nightly" in steps["test"]
    assert (ROOT / ".ci/nightly").stat().st_mode & 0o100
    assert "trl @ git+" in workflow["jobs"]["trl"]["strategy"]["matrix"]["package"][-1]
    assert "--nightly tests/integrations" in steps["trl"] and "matrix.package" in steps["trl"]
    assert "verl_run.py tests/data/verl_gradients.json" in steps["verl"]
    assert "mkdocs build --strict -f .mkdocs.yml" in steps["site"]
    assert "verl_dump.py" in steps["verl"] and "TransferQueue" in steps["verl"]


def test_a_push_runs_the_fast_and_the_slow_tests_a_night_the_others():
    jobs = {name: (ROOT / ".ci" / name).read_text() for name in ("run", "nightly")}
    assert "./scripts/test\n" in jobs["run"] and "./scripts/test --slow" in jobs["run"]
    assert "./scripts/test --nightly" in jobs["nightly"] and "--nightly" not in jobs["run"]


def test_a_commit_is_formatted_by_the_ruff_that_checks_it():
    (hooks,) = read(".pre-commit-config.yaml")["repos"]
    pinned = re.search(r"^ruff==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]
    assert hooks["rev"] == f"v{pinned}"
    assert [hook["id"] for hook in hooks["hooks"]] == ["ruff-check", "ruff-format"]


def test_the_citations_are_of_this_version():
    citation, readme = read("CITATION.cff"), (ROOT / "README.md").read_text()
    assert citation["version"] == grpo_ustat.__version__ and citation["license"] == "Apache-2.0"
    assert re.findall(r"version = \{(.*)\}", readme) == [grpo_ustat.__version__]
    assert citation["preferred-citation"]["title"] in " ".join(readme.split())
    for entry in (citation, citation["preferred-citation"]):
        assert (
            entry["title"]
            and entry["type"]
            and all(a.get("name") or a["family-names"] for a in entry["authors"])
        )


def test_the_newest_section_of_the_changelog_is_of_this_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(\d[^\]]*)\]", text, re.MULTILINE)
    assert versions[:1] == [grpo_ustat.__version__]


def test_a_tag_is_checked_and_then_published_without_a_secret():
    workflow = read(".github/workflows/publish.yml")
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    build, publish = workflow["jobs"]["build"], workflow["jobs"]["publish"]
    (checked,) = [step["run"] for step in build["steps"] if "run" in step]
    assert "check_package.py" in checked and '--tag "$GITHUB_REF_NAME"' in checked
    assert publish["needs"] == "build" and publish["environment"] == "pypi"
    assert publish["permissions"] == {"id-token": "write"}
    assert publish["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert "secrets." not in (ROOT / ".github/workflows/publish.yml").read_text()


def test_files_that_contributors_are_sent_to_are_there():
    missing = []
    for name in ("CONTRIBUTING.md", "SECURITY.md"):
        for path in re.findall(r"`([\w.]+/[\w./-]*|\.\w+/\w+)`", (ROOT / name).read_text()):
            if not ("NAME" in path or path.endswith("mean_length") or (ROOT / path).exists()):
                missing.append((name, path))
    assert missing == []


def test_names_that_contributors_are_sent_to_are_there():
    """Where the page says a name of a file: the file defines it."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    pairs = re.findall(r"`(\w+)` of\s+`([\w/]+\.py)`", text)
    assert len(pairs) >= 3
    for name, file in pairs:
        assert re.search(rf"^(def |){name}\b", (ROOT / file).read_text(), re.MULTILINE), name
