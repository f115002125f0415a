"""What is said of the time that a stop takes, and when that is a warning."""

from __future__ import annotations

import pytest

from grpo_ustat.distributed import slurm
from grpo_ustat.distributed.ranks import PARENT_VARIABLE
from grpo_ustat.train.trainer import report_grace

PARENTS = "s from the parent process (launch.grace_seconds)"
PREEMPTED = "s after a preemption (GraceTime)"
CANCELLED = "s after scancel (KillWait)"
# Under a parent that grants 20 s; GraceTime; KillWait; what is said; beyond which steps are lost
CASES = {
    "nobody sets a limit": (False, None, None, None, None),
    "no preemption, and SLURM's default": (False, 0.0, None, None, None),
    "a parent": (True, None, None, f"20 {PARENTS}", 20),
    "a parent, SLURM's default": (True, 0.0, None, f"20 {PARENTS}", 20),
    "preemption": (False, 15.0, None, f"15 {PREEMPTED}", 15),
    "a parent, shorter preemption": (True, 15.0, None, f"20 {PARENTS}, 15 {PREEMPTED}", 15),
    "a parent, longer preemption": (True, 60.0, None, f"20 {PARENTS}, 60 {PREEMPTED}", 20),
    "cancelled": (False, None, 5.0, f"5 {CANCELLED}", None),
    "cancelled, SLURM's default": (False, 0.0, 30.0, f"30 {CANCELLED}", None),
    "cancelled at once": (False, None, 0.0, f"0 {CANCELLED}", None),
    "a parent, cancelled": (True, None, 5.0, f"20 {PARENTS}, 5 {CANCELLED}", 20),
    "a parent, cancelled, SLURM's default": (True, 0.0, 5.0, f"20 {PARENTS}, 5 {CANCELLED}", 20),
    "preempted, cancelled": (False, 15.0, 5.0, f"15 {PREEMPTED}, 5 {CANCELLED}", 15),
    "all": (True, 15.0, 5.5, f"20 {PARENTS}, 15 {PREEMPTED}, 5.5 {CANCELLED}", 15),
}


@pytest.mark.parametrize("parent, preempted, killed, said, limit", CASES.values(), ids=CASES)
@pytest.mark.parametrize("step, save", [(4.0, 2.0), (11.5, 3.5), (11.5, 3.6), (9.0, 90.0)])
def test_grace_periods_and_warning_where_steps_would_be_lost(
    monkeypatch, capsys, parent, preempted, killed, said, limit, step, save
):
    """Up to 15.0 s fit into 15 s, 15.1 s do not."""
    monkeypatch.delenv(PARENT_VARIABLE, raising=False)
    if parent:
        monkeypatch.setenv(PARENT_VARIABLE, "1")
    monkeypatch.setattr(slurm, "grace", lambda: slurm.Grace(preempted, killed))
    report_grace(step, save, 20)
    out, err = capsys.readouterr()
    if said is None:
        assert (out, err) == ("", "")
        return
    lost = limit is not None and step + save > limit
    assert not out and err.count("\n") == 1
    assert said in err and f"{step:.1f} s" in err and f"{save:.1f} s" in err
    assert err.startswith("warning: ") == ("save_steps" in err) == lost


def test_slurm_is_not_asked_outside_of_it(monkeypatch, capsys):
    for name in (PARENT_VARIABLE, "SLURM_JOB_PARTITION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(slurm, "_query", lambda *words: pytest.fail(f"asked {words}"))
    report_grace(1000.0, 1000.0, 1)
    assert capsys.readouterr() == ("", "")
