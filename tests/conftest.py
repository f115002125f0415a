import gc
import os
import signal
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent / "helpers"))

WRITES_NO_BYTECODE = sys.dont_write_bytecode
sys.dont_write_bytecode = False  # until all is collected: later workers and processes read it

import pytest  # noqa: E402
import torch  # noqa: E402
from precision import compute_in_double  # noqa: E402

from grpo_ustat.pages import figures, learning  # noqa: E402

gc.disable()  # until all tests are collected: it would find nothing
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what ends with &
    signal.signal(signal.SIGINT, signal.default_int_handler)

FORMATS = figures.UNDATED_METADATA
KINDS = ("nightly", "slow")  # marks of tests that run only where their option is given


def pytest_addoption(parser):
    for kind in KINDS:
        parser.addoption(f"--{kind}", action="store_true", help=f"run the {kind} tests alone")
    parser.addoption("--rewrite", action="store_true", help="write tests/golden/ anew")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """The package has doctests; a file of tests is read once, and helpers by those who use them."""
    return [one for one in (yield) if type(one) is pytest.Module]


def pytest_collection_modifyitems(config, items):
    """The fast tests, or those of the kinds that are asked for; the longest files first.

    Of workers that take a file each (.ci/run) none is then left alone with a long one.
    """
    wanted, kept, others = [kind for kind in KINDS if config.getoption(kind)] or [""], [], []
    if config.getoption("rewrite"):
        wanted = ["", "slow"]
    for item in items:
        (kept if _kind(item) in wanted else others).append(item)
    config.hook.pytest_deselected(items=others)
    minutes = Counter()
    for item in kept:
        minutes[item.path] += _minutes(item)
    items[:] = sorted(kept, key=lambda item: -minutes[item.path])


def pytest_collection_finish(session):
    """What is imported by now stays; looking through it anew takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.enable()
    sys.dont_write_bytecode = WRITES_NO_BYTECODE


def _kind(item):
    """The kind of a test: nightly wherever it is marked so, by slow too; "" is fast."""
    return next((kind for kind in KINDS if item.get_closest_marker(kind)), "")


def _minutes(item):
    """Minutes of a test by its mark; 0.1 where that says none, which is what most of them take."""
    marker = item.get_closest_marker(_kind(item)) if _kind(item) else None
    return marker.kwargs.get("minutes", 0.1) if marker else 0


@pytest.fixture
def rng():
    import numpy as np

    return np.random.default_rng(20260301)


@pytest.fixture
def environment_as_before():
    """Also where the code under test has changed it, as a process that becomes a rank does."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def float64_models_are_float64_throughout(environment_as_before, monkeypatch):
    compute_in_double(monkeypatch)


@pytest.fixture(autouse=True, scope="session")
def few_figures():
    """None of each training run, and one format of the others: a run's own work takes less time.

    tests/pages/test_learning.py draws the former, `every_format` writes the latter.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "draw_learning", lambda folder: None)
        patch.setattr(figures, "UNDATED_METADATA", {"svg": figures.UNDATED_METADATA["svg"]})
        yield


@pytest.fixture(scope="module")
def every_format():
    """Figures of this file's tests in PDF, SVG and PNG, as a user gets them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "UNDATED_METADATA", FORMATS)
        yield
