"""verl's logit-space weight: against differentiation, and the tool on a small pool."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from warm import run_python

pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).parents[2] / "scripts/tools/logit_weight.py"


def test_the_weight_is_the_squared_length_of_the_logit_gradient():
    logit_weights = runpy.run_path(str(SCRIPT))["logit_weights"]
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([[0, 3, 6], [2, 2, 5]])
    chosen = logits.log_softmax(-1).gather(2, tokens[:, :, None]).sum()
    (gradient,) = torch.autograd.grad(chosen, logits)
    torch.testing.assert_close(logit_weights(logits, tokens), gradient.square().sum(-1))


@pytest.mark.nightly
def test_the_tool_prints_a_correlation_of_each_proxy(tmp_path):
    asked = ("model=tiny_base", "study.questions=12", "budget.pool_completions=6")
    done = run_python(SCRIPT, *asked, f"pool={tmp_path / 'pool'}")
    assert done.returncode == 0, done.stderr
    number = r"-?\d\.\d{3}"
    for proxy in ("logit weight", "length"):
        line = rf"{proxy} +{number} \[{number}, {number}\]"
        assert re.search(line, done.stdout), done.stdout
