"""Plans on a study's page: records, table, figure and CSV."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from prompt_pools import pool_of, prompts, study_of_pool

from grpo_ustat.estimators.plans import PLANS
from grpo_ustat.measurements import plans
from grpo_ustat.runs.contents import content_of, misfit, record_of


@pytest.fixture(scope="module")
def rows():
    pool = pool_of(prompts(30, np.random.default_rng(0)), 24, np.random.default_rng(1))
    study = study_of_pool(
        pool, group_sizes=(2, 4, 8), rollouts=64, plans=list(PLANS), plan_sizes=(4, 9)
    )
    return plans.measure(study)


def test_records_come_back_from_a_file(rows):
    content = content_of(rows)
    assert misfit(content, plans.PLAN_EFFICIENCIES.record) is None
    assert content_of(record_of(plans.PLAN_EFFICIENCIES.record, content)) == content


def test_a_study_without_plans_measures_none():
    study = SimpleNamespace(plans=(), asked=frozenset())
    assert plans.measure(study) is None


def test_the_table_has_all_plans_and_says_what_is_missing(rows):
    (table,) = plans.tables({object(): rows})
    assert {row[0] for row in table.rows} == set(PLANS)
    # 26 completions are too few for a history of 8 and a mean of 9.
    missing = [note for note in table.notes if note.startswith("Not measured")]
    assert any("vip" in note and "26" in note for note in missing)
    fixed = next(row for row in table.rows if row[:3] == ["fixed", "per_rollout", "4"])
    assert fixed[3:8] == ["4.0", "4.0", "unbiased", "1.00", "1.00"]
    flat = [plans._flat(row) for row in rows]
    assert len({tuple(row) for row in flat}) == 1 and "weight_0.1" in flat[0]


def test_the_figure_has_a_line_for_each_plan(rows, tmp_path):
    plans.draw(tmp_path, {object(): rows}, [])
    text = (tmp_path / "plans.svg").read_text()
    assert "until_mixed" in text and "unbiased" in text
