import gc
import os
import signal
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent / "helpers"))

import pytest  # noqa: E402
import torch  # noqa: E402
from precision import compute_in_double  # noqa: E402

from grpo_ustat.pages import learning  # noqa: E402

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what ends with &
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Collected for doctests they would be imported: `wandb`, for one, by all tests that come after.
collect_ignore = ["helpers/stub_trackers", "helpers/stub_math_verify"]


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the slow tests instead of the fast")


def pytest_collection_modifyitems(config, items):
    """Without --slow the fast tests run, with it the slow ones, the longest files first.

    Of workers that take a file each (.ci/run) none is then left alone with a long one.
    """
    wanted, kept, others = config.getoption("--slow"), [], []
    for item in items:
        (kept if bool(item.get_closest_marker("slow")) == wanted else others).append(item)
    config.hook.pytest_deselected(items=others)
    minutes = Counter()
    for item in kept:
        minutes[item.path] += _minutes(item)
    items[:] = sorted(kept, key=lambda item: -minutes[item.path])


def pytest_collection_finish(session):
    """What is imported by now stays; looking through it anew takes a tenth of the time."""
    gc.collect()
    gc.freeze()


def _minutes(item):
    """As its mark says; most slow tests take a quarter of one."""
    marker = item.get_closest_marker("slow")
    return marker.kwargs.get("minutes", 0.25) if marker else 0


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
def without_a_figure_of_each_training_run():
    """It takes longer than most runs here; tests/pages/test_learning.py draws it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "draw_learning", lambda folder: None)
        yield
