"""Claims as a family: Holm's correction, its error rate, and what it makes of each verdict."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from grpo_ustat.gap.claims import interval_p_value, mean_interval, mean_p_value, replicates_converge
from grpo_ustat.gap.evidence import Evidence, Panel
from grpo_ustat.runs.claims import Claim, correct_family, holm_adjust
from grpo_ustat.runs.record import AGREES, DISAGREES, OPEN


def claim(p_value, verdict=AGREES, **changes):
    return Claim("a mean", 0.0, 0.1, -0.1, 0.3, verdict, "t test", p_value, **changes)


def evidence(*claims):
    return Evidence(claims, Panel("", "", []), [])


def test_adjusted_p_values_are_those_worked_by_hand():
    """0.01, 0.02, 0.03, 0.2 times 4, 3, 2, 1 is 0.04, 0.06, 0.06, 0.2, none below one before it."""
    found = holm_adjust([0.2, 0.03, 0.01, 0.02])
    assert found == pytest.approx([0.2, 0.06, 0.04, 0.06])
    assert holm_adjust([]) == [] and holm_adjust([0.7, 0.8]) == [1.0, 1.0]


def test_holm_rejects_what_the_slow_procedure_rejects(rng):
    """Ascending, each p against 5 % over what is left, until one is not rejected."""
    for _ in range(200):
        p_values = rng.random(6) ** 3
        slow, left = set(), sorted(range(6), key=lambda i: p_values[i])
        while left and p_values[left[0]] <= 0.05 / len(left):
            slow.add(left.pop(0))
        found = {i for i, p in enumerate(holm_adjust(p_values)) if p <= 0.05}
        assert found == slow


@pytest.mark.parametrize("shared", [0.0, 0.5, 0.95])
def test_at_most_one_family_in_twenty_errs_however_claims_depend(shared, rng):
    """4000 families of 12 true claims with a common part; one by one 20 to 46 % of them err."""
    z = np.sqrt(shared) * rng.normal(size=(4000, 1)) + np.sqrt(1 - shared) * rng.normal(
        size=(4000, 12)
    )
    p_values = 2 * stats.norm.sf(np.abs(z))
    wrong = sum(min(holm_adjust(row)) <= 0.05 for row in p_values)
    assert wrong <= stats.binom.ppf(0.999, 4000, 0.05)
    assert (p_values.min(axis=1) <= 0.05).mean() > 0.08


def test_a_claim_disagrees_only_where_the_family_rejects_it():
    alone = evidence(claim(0.03, DISAGREES))
    assert alone.verdict == DISAGREES and alone.claims[0].holm_p == 0.03
    among = evidence(claim(0.03, DISAGREES), claim(0.5), claim(None))
    assert among.verdict == AGREES and among.claims[0].holm_p == 0.06
    assert among.claims[0].p_value == 0.03 and among.claims[2].holm_p is None
    assert evidence(claim(0.001), claim(0.5)).verdict == DISAGREES
    assert evidence(claim(0.9), claim(None, DISAGREES)).verdict == DISAGREES  # enumerated


def test_what_the_study_leaves_open_stays_open_unless_it_says_otherwise():
    for p_value, when_rejected, expected in (
        (0.5, None, OPEN), (0.001, None, OPEN), (0.5, DISAGREES, OPEN),
        (0.001, DISAGREES, DISAGREES),
    ):  # fmt: skip
        (one,) = evidence(claim(p_value, OPEN, when_rejected=when_rejected)).claims
        assert one.verdict == expected
    assert evidence(claim(0.001, when_rejected=OPEN)).verdict == OPEN


def test_severity_counts_the_alternatives_that_the_family_would_not_reject():
    """Of two claims the first is rejected at 2.5 %."""
    alternatives = {"half": 0.03, "twice": 0.02, "thrice": 1e-9}
    found = evidence(claim(0.5, alternatives=alternatives), claim(0.5, severity="any would"))
    counted, given = (one.severity for one in found.claims)
    assert counted.startswith("1 of 3 ") and counted.endswith("half") and given == "any would"


def test_correcting_twice_changes_nothing():
    claims = [claim(0.01, DISAGREES), claim(0.04, DISAGREES), claim(0.03, OPEN), claim(None)]
    once = correct_family(claims)
    assert correct_family(once) == once == list(replace(evidence(), claims=once).claims)


def test_what_falls_with_t_is_told_from_what_stays(rng):
    """A distance of 4 and 1 at T = 100 and 400 falls, one of 1 and 1 does not, in 5 % at most."""
    noise_R = rng.normal(size=400)
    assert replicates_converge(1 + noise_R, 4 + noise_R, 400, 100)
    assert not replicates_converge(1 + noise_R, 1 + noise_R, 400, 100)
    constant = (1 + rng.normal(size=(2, 60)) for _ in range(400))
    edge = 4**0.25  # at most 5 % where it falls like T^(-1/4) exactly
    wrong = sum(
        replicates_converge(last_R, edge + before_R - 1, 400, 100) for last_R, before_R in constant
    )
    assert wrong <= stats.binom.ppf(0.999, 400, 0.05)


def test_of_replicates_both_p_values_are_scipys(rng):
    values = rng.normal(0.3, 1.0, 20)
    expected = stats.ttest_1samp(values, 0.0).pvalue
    assert mean_p_value(values) == pytest.approx(expected, rel=1e-12)
    assert interval_p_value(mean_interval(values), 19, 0.0) == pytest.approx(expected, rel=1e-9)
    above = stats.ttest_1samp(values, 0.0, alternative="greater").pvalue
    assert mean_p_value(values, above=True) == pytest.approx(above, rel=1e-12)
