import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the slow tests instead of the fast")


def pytest_collection_modifyitems(config, items):
    """Without --slow the fast tests run, with it the slow ones; naming a test runs it."""
    wanted = config.getoption("--slow")
    kept = [item for item in items if bool(item.get_closest_marker("slow")) == wanted]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


@pytest.fixture
def rng():
    import numpy as np

    return np.random.default_rng(20260301)


@pytest.fixture(autouse=True)
def norms_in_their_own_precision(monkeypatch):
    """transformers computes RMSNorm in float32 even in a float64 model; comparisons to 1e-10 need
    the whole model in float64. Narrower models keep their own forward."""
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    original = Qwen2RMSNorm.forward

    def forward(self, hidden):
        if hidden.dtype != torch.float64:
            return original(self, hidden)
        scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (hidden * scale)

    monkeypatch.setattr(Qwen2RMSNorm, "forward", forward)
