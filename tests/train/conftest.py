from functools import cache

import pytest
from resuming import fit


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """`fit` of some overrides, once for all tests of a process; copy its folder to change it."""
    return cache(lambda *overrides: fit(tmp_path_factory.mktemp("trained") / "run", *overrides))


@pytest.fixture(scope="session")
def through(trained):
    """A run of `resuming.SHORT` that was never stopped."""
    return trained()
