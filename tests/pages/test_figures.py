"""Figures: every baseline has a colour and a marker, one of somebody's own too."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from grpo_ustat.estimators.baselines import BASELINES, Baseline, none, registry
from grpo_ustat.pages.figures import STYLE, baseline_style

OWN = ("median", "trimmed_mean", "Mittelwert", "x")  # no package offers them here


def test_a_baseline_of_ones_own_looks_like_none_of_ours_and_has_its_name():
    of_ours = {name: baseline_style(name, True)[:2] for name in BASELINES if name not in OWN}
    assert len(set(of_ours.values())) == len(of_ours)
    for name in OWN:
        colour, marker, label = baseline_style(name, unbiased=True)
        assert (colour, marker) not in of_ours.values()
        assert label == name
    assert baseline_style("median", unbiased=False)[2] == "median (biased)"
    assert baseline_style("none", unbiased=True) == STYLE["none"]


@pytest.mark.slow
def test_its_style_is_the_same_in_every_process_and_once_it_is_loaded(monkeypatch):
    """Python's own `hash` of a text differs from process to process."""
    before = [baseline_style(name, True) for name in OWN]
    code = "from grpo_ustat.pages.figures import baseline_style as style; "
    code += f"print([style(name, True) for name in {OWN}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == str(before), done.stderr
    loaded = SimpleNamespace(load=lambda: Baseline(name, none, unbiased=True, min_group_size=1))
    monkeypatch.setattr(registry, "entry_points", lambda group: dict.fromkeys(OWN, loaded))
    monkeypatch.setattr(BASELINES, "_loaded", {})
    for name in OWN:
        assert BASELINES[name].advantage is none
    assert [baseline_style(name, True) for name in OWN] == before
