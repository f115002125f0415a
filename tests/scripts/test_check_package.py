"""What the check of the package refuses, and that it tries every extra that there is."""

from __future__ import annotations

import io
import re
import runpy
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
import yaml

import grpo_ustat

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/tools/check_package.py"


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(SCRIPT), run_name="check_package")


@pytest.fixture(scope="module")
def files(script):
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = [re.sub("^conf/", "grpo_ustat/conf/", x) for x in script["tracked"](*script["WHEEL"])]
    return {"source": script["tracked"](*script["SOURCE"]), "wheel": set(names)}


def test_every_extra_is_tried_every_night(script):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tried = {extra for trial in script["TRIALS"].values() for extra in trial.extras.split(",")}
    assert tried - {""} | script["OTHERS"].keys() == project["optional-dependencies"].keys()
    nightly = yaml.safe_load((ROOT / ".github/workflows/nightly.yml").read_text())
    assert nightly["jobs"]["package"]["strategy"]["matrix"]["extra"] == [*script["TRIALS"]]


def test_every_verb_shows_its_help(script):
    from grpo_ustat.cli.verbs import VERBS

    assert set(script["VERBS"]) == set(VERBS)


def packed(folder, source, wheel):
    """A source archive and a wheel of empty files."""
    archive, code = folder / "x-1.tar.gz", folder / "x-1.whl"
    with tarfile.open(archive, "w:gz") as opened:
        for name in ["PKG-INFO", *source]:
            opened.addfile(tarfile.TarInfo(f"x-1/{name}"), io.BytesIO())
    with zipfile.ZipFile(code, "w") as opened:
        for name in ["x-1.dist-info/METADATA", *wheel]:
            opened.writestr(name, "")
    return archive, code


def test_the_files_are_those_of_the_repository(script, files, tmp_path):
    assert "grpo_ustat/py.typed" in files["wheel"] and "grpo_ustat/conf/mse.yaml" in files["wheel"]
    assert {"CHANGELOG.md", "docs/trl.md", "conf/mse.yaml"} <= files["source"]
    assert not [name for name in files["source"] if name.startswith(("tests/", "scripts/"))]
    script["check_contents"](*packed(tmp_path, files["source"], files["wheel"]))


@pytest.mark.parametrize("which", ["source", "wheel"])
def test_a_file_too_few_or_too_many_is_named(script, files, tmp_path, which):
    for held, named in (
        (files[which] - {"grpo_ustat/py.typed"}, r"lacks \['grpo_ustat/py.typed'\]"),
        (files[which] | {"tests/x.py"}, r"should not have \['tests/x.py'\]"),
    ):
        with pytest.raises(script["Failure"], match=named):
            script["check_contents"](*packed(tmp_path, **files | {which: held}))


def described(text, version=grpo_ustat.__version__):
    message = Message()
    message["Version"] = version
    message.set_payload(text)
    return message


@pytest.mark.parametrize(
    "text", ["see [x](docs/trl.md)", "![x](docs/images/x.png)", "`./scripts/run mse`", "in `.venv`"]
)
def test_a_description_that_leads_nowhere_is_refused(script, text):
    with pytest.raises(script["Failure"], match="does not work on a package index's page"):
        script["check_metadata"](described(text), "")


def test_a_tag_is_of_the_version_and_of_a_section(script):
    script["check_metadata"](described("[below](#install)"), "")
    with pytest.raises(script["Failure"], match="the tag is v9, but the version"):
        script["check_metadata"](described("x"), "v9")
    with pytest.raises(script["Failure"], match=r"no section \[0.0.9\]"):
        script["check_metadata"](described("x", "0.0.9"), "v0.0.9")


@pytest.mark.nightly(minutes=1.5)
def test_the_package_alone_brings_numpy_and_scipy(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "core", "--dist", tmp_path / "dist"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "core: 2 packages" in done.stdout and len([*(tmp_path / "dist").iterdir()]) == 2
