"""Held-out accuracy over seeds: intervals by hand, the best and those like it."""

from __future__ import annotations

import numpy as np
import pytest

from grpo_ustat.report.accuracy import (
    BY_BUDGET,
    BY_LINE,
    BY_SETTING,
    LESS,
    accuracy_cells,
    accuracy_table,
    budget_table,
    captions,
    difference,
    notes,
    pooled_cells,
    settings_table,
)
from grpo_ustat.report.accuracy_answer import best_sentence
from grpo_ustat.report.settings import Axis

SIZES = [4, 8, 16, 32, 64, 128]


def row(size, seed, mean, rollouts=256, n=500, quantity="accuracy"):
    of = {"series": "", "rollouts": rollouts, "step": 25, "group_size": size, "seed": seed, "n": n}
    of |= {"line": f"n={rollouts}", "x": size, "test": "", "setting": ""}
    of |= {"quantity": quantity, "mean_reward": mean}
    return of | {"low": mean - 0.04, "high": mean + 0.04}


def test_the_interval_over_seeds_is_the_t_interval_worked_by_hand():
    """0.50 0.52 0.54 0.56 0.58: mean 0.54, s = sqrt(0.001), t_4 = 2.776445."""
    rows = [row(8, seed, 0.50 + 0.02 * seed) for seed in range(5)]
    (cell,) = accuracy_cells(rows)
    half = 2.776445 * np.sqrt(0.001 / 5)
    assert cell["mean_reward"] == pytest.approx(0.54)
    assert (cell["low"], cell["high"]) == pytest.approx((0.54 - half, 0.54 + half), abs=1e-6)
    assert cell["best"] and cell["seeds"] == 5 and cell["difference"] is None


def test_the_best_is_compared_on_shared_seeds():
    """Seeds that move all G alike leave the paired difference sharp; means alone would not tell."""
    shift = [0.0, 0.1, 0.2, 0.3, 0.4]
    rows = [row(4, s, 0.30 + x) for s, x in enumerate(shift)]
    rows += [row(8, s, 0.33 + x + 0.001 * (-1) ** s) for s, x in enumerate(shift)]
    rows += [row(16, s, 0.33 + x - 0.01 * (-1) ** s) for s, x in enumerate(shift)]
    four, eight, sixteen = accuracy_cells(rows)
    assert eight["best"] and not four["best"]
    assert four["distinct"] and four["difference"] == pytest.approx(-0.0302)
    assert four["low"] < eight["mean_reward"] < four["high"]
    assert sixteen["distinct"] is False and sixteen["difference_high"] > 0


def test_missing_seeds_are_counted_and_only_shared_ones_compared():
    rows = [row(4, s, 0.4) for s in (0, 1, 2)] + [row(8, s, 0.5 + 0.01 * s) for s in (1, 2, 3)]
    four, eight = accuracy_cells(rows)
    assert (four["seeds"], four["shared_seeds"]) == (3, 2)
    assert four["difference"] == pytest.approx(0.4 - 0.515)
    assert "of 3" not in accuracy_table([four, eight], [], Axis(values=(4, 8))).rows[0][1]
    few = accuracy_cells([row(4, 0, 0.4), row(8, 1, 0.5), row(8, 2, 0.5)])[0]
    assert few["distinct"] is None and few["difference"] is None


def test_one_seed_is_compared_over_questions():
    """Two independent samples: half-widths 0.04 add to 0.04 sqrt(2)."""
    found = difference({0: row(4, 0, 0.4)}, {0: row(8, 0, 0.5)})
    assert found.estimate == pytest.approx(-0.1)
    assert found.high == pytest.approx(-0.1 + 0.04 * np.sqrt(2), abs=1e-4)


def test_the_differences_of_a_row_are_simultaneous():
    """Three G: two differences at 97.5 %, t_4 = 3.495406; two G: one at 95 %, t_4 = 2.776445."""
    wave = [0.0, 0.01, 0.02, 0.03, 0.04]  # s = sqrt(0.00025)
    rows = [row(4, s, 0.5) for s in range(5)] + [row(8, s, 0.4 + x) for s, x in enumerate(wave)]
    third = [row(16, s, 0.3) for s in range(5)]
    for found, t in (
        (accuracy_cells(rows)[1], 2.776445),
        (accuracy_cells(rows + third)[1], 3.495406),
    ):
        half = t * np.sqrt(0.00025 / 5)
        assert found["difference_high"] == pytest.approx(-0.08 + half, abs=1e-6)


def test_pooled_differences_have_the_residual_variance_of_cells_and_seeds():
    """Three cells, two seeds, the seeds' own effect 0.3: residuals +-0.01, +-0.02 and +-0.03 about
    their means -+0.0 sum to 0 over cells: s^2 = 2 (0.01^2 + 0.02^2 + 0.03^2) / 2 = 0.0014.
    """
    residuals = {4: 0.01, 8: 0.02, 16: -0.03}
    means = {4: 0.3, 8: 0.5, 16: 0.4}
    rows = [
        row(g, s, means[g] + 0.3 * s + x * (1 if s else -1))
        for g, x in residuals.items()
        for s in (0, 1)
    ]
    four, eight, sixteen = accuracy_cells(rows, pooled=True)
    t = 6.205347  # 97.5 % two-sided, 2 degrees of freedom
    for cell, gap in ((four, -0.2), (sixteen, -0.1)):
        assert cell["difference_high"] == pytest.approx(gap + t * np.sqrt(0.0014), abs=1e-6)
        assert cell["difference_dof"] == 2
    own = accuracy_cells(rows)[0]
    assert own["difference_dof"] is None and own["difference_high"] > 0.0


@pytest.mark.slow
def test_pooled_differences_tell_equal_sizes_apart_as_seldom(rng):
    """400 rows of three seeds; of a sure difference 90 % are told in place of 47 %."""
    found, sure = 0, 0
    for _ in range(400):
        rows = [row(g, s, 0.75 + 0.02 * rng.standard_normal()) for g in SIZES for s in range(3)]
        found += any(cell["distinct"] for cell in accuracy_cells(rows, pooled=True))
        for one in rows[:3]:
            one["mean_reward"] += 0.06
        sure += any(cell["distinct"] for cell in accuracy_cells(rows, pooled=True))
    assert 0 < found < 0.12 * 400 and sure > 0.8 * 400


def told_apart(rng, draws, seeds):
    """Share of rows, of six equal G, in which any is told from the best."""
    found = 0
    for _ in range(draws):
        rows = [row(g, s, 0.75 + 0.02 * rng.standard_normal()) for g in SIZES for s in range(seeds)]
        found += any(cell["distinct"] for cell in accuracy_cells(rows))
    return found / draws


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [5, 1])
def test_equal_sizes_are_seldom_told_apart(seeds, rng):
    """400 rows; 95 % intervals of each difference alone told some apart in a third of them.

    With one seed 0.02 is the standard error that a half-width of 0.04 stands for.
    """
    assert 0 < told_apart(rng, 400, seeds) < 0.12


def test_captions_name_the_number_of_seeds():
    def said(rows):
        return " ".join(notes(accuracy_cells(rows), LESS, "in the same row"))

    five = [row(8, s, 0.4 + 0.01 * s) for s in range(5)] + [row(4, s, 0.3) for s in range(5)]
    one = [row(16, 0, 0.2), row(32, 0, 0.1)]
    assert "between 5 seeds" in said(five) and "one seed" not in said(five)
    cells = pooled_cells(accuracy_cells(one))
    assert "one seed. Hollow" in captions(cells, "on the same line")[0]
    alike = [cell | {"decided": False} for cell in cells]
    assert "Hollow" not in captions(alike, "on the same line")[0]
    assert "seeds and" not in said(one) and "not paired." in said(one)
    assert "between 5 seeds" in said(five + one) and "one seed (at G = 16, 32)" in said(five + one)


def test_seeds_that_are_all_alike_keep_the_width_of_their_rounding():
    """60 questions: an accuracy is rounded to 1/60, with variance 1 / (12 60^2); of a difference
    twice that. t_2 = 4.302653, over two differences 6.205347.
    """
    rows = [row(g, s, x, n=60) for g, x in ((4, 0.30), (8, 17 / 60), (16, 0.1)) for s in range(3)]
    four, eight, sixteen = accuracy_cells(rows)
    assert four["high"] - 0.30 == pytest.approx(4.302653 / 60 / 6, abs=1e-6)
    half = 6.205347 / 60 * np.sqrt(1 / 6 / 3)
    assert eight["difference_high"] == pytest.approx(-1 / 60 + half, abs=1e-6)
    assert eight["distinct"] is False and sixteen["distinct"]


def test_intervals_over_questions_are_the_mean_of_the_runs_own():
    (cell,) = accuracy_cells([row(4, 0, 0.2), row(4, 1, 0.4)])
    found = [cell[f"questions_{end}"] for end in ("low", "high")]
    assert found == pytest.approx([0.26, 0.34]) and cell["over"] == "seeds"
    assert (cell["low"], cell["high"]) == (0.0, 1.0)  # t_1 reaches further than an accuracy can


def test_the_best_of_a_table_of_budgets_is_one_and_all_others_are_compared_with_it():
    """Paired on seeds that move all cells alike: 0.5 is told from 0.6, 0.599 +- 0.002 is not."""
    means = {(256, 4): 0.5, (256, 8): 0.599, (512, 4): 0.6, (512, 8): 0.4}
    rows = [
        row(g, s, mean + 0.05 * s + (0.002 * (-1) ** s if (n, g) == (256, 8) else 0), n)
        for (n, g), mean in means.items()
        for s in range(4)
    ]
    cells = {(c["rollouts"], c["group_size"]): c for c in accuracy_cells(rows, BY_BUDGET)}
    assert [key for key, cell in cells.items() if cell["best"]] == [(512, 4)]
    assert {key: cell["distinct"] for key, cell in cells.items()} == {
        (256, 4): True, (256, 8): False, (512, 4): None, (512, 8): True
    }  # fmt: skip
    by_step = accuracy_cells(rows)
    assert sum(cell["best"] for cell in by_step) == 2  # one for each budget
    sheet = budget_table(list(cells.values()))
    marks = [[text.split()[0][5:] for text in line[1:]] for line in sheet.rows]
    assert sheet.columns == ["", "G = 4", "G = 8"] and marks == [["*", ""], ["", "*"]]


def test_a_cell_says_when_it_has_fewer_seeds_or_none():
    rows = [
        row(4, 0, 0.4),
        row(4, 1, 0.5),
        row(8, 0, 0.4),
        row(8, 0, 0.4, 512),
        row(4, 0, 0.1, 512),
    ]
    sheet = budget_table(accuracy_cells(rows[:4], BY_BUDGET))
    (_, four, eight), (_, none, other) = sheet.rows
    assert "of" not in four and "1 of 2" in eight and "1 of 2" in other
    assert none == "-"


def test_intervals_of_few_seeds_have_one_variance_pooled_over_the_cells_of_a_line():
    """Two seeds each: squared deviations 2 * 0.01^2 and 2 * 0.03^2, sum 0.002 over 2 degrees of
    freedom: s^2 = 0.001, t_2 = 4.302653; the third cell has one seed and its own interval.
    """
    rows = [row(4, s, 0.5 + 0.02 * s) for s in (0, 1)] + [row(8, s, 0.4 + 0.06 * s) for s in (0, 1)]
    rows += [row(16, 0, 0.3), row(4, 0, 0.1, rollouts=512), row(4, 1, 0.1, rollouts=512)]
    four, eight, sixteen, other = pooled_cells(accuracy_cells(rows, BY_LINE))
    half = 4.302653 * np.sqrt(0.001 / 2)
    for cell in (four, eight):
        ends = cell["mean_reward"] - half, cell["mean_reward"] + half
        assert (cell["low"], cell["high"]) == pytest.approx(ends, abs=1e-6) and cell["dof"] == 2
    assert (sixteen["low"], sixteen["high"], sixteen["dof"]) == (0.26, pytest.approx(0.34), None)
    assert other["dof"] == 1 and other["high"] < 0.11  # a line of its own
    assert "1 to 2 degrees" in notes([four, eight, other], ("*", "~", "no mark"), "the G")[0]


def coverage(rng, sds, seeds=3, draws=700):
    """Share of pooled intervals that hold their cell's mean, of each cell."""
    inside = np.zeros(len(sds))
    for _ in range(draws):
        rows = [
            row(g, s, 0.4 + sd * rng.standard_normal())
            for g, sd in zip(SIZES, sds, strict=True)
            for s in range(seeds)
        ]
        cells = pooled_cells(accuracy_cells(rows, BY_LINE))
        inside += [cell["low"] <= 0.4 <= cell["high"] for cell in cells]
    return inside / draws


@pytest.mark.slow
def test_pooled_intervals_of_three_seeds_cover(rng):
    """4200 intervals of equal variances: 95 %, 0.4 % the standard error. Of standard deviations
    from 1 to 2 the mean is 94 %, and the noisiest cell has less.
    """
    assert 0.935 < coverage(rng, [0.02] * 6).mean() < 0.965
    unequal = coverage(rng, [0.01, 0.012, 0.014, 0.016, 0.018, 0.02])
    assert 0.92 < unequal.mean() < 0.96 and 0.80 < unequal[-1] < 0.92 < unequal[0]


def test_nothing_is_the_best_where_nothing_differs():
    """Equal means with noise: no mark; a sure difference: that of the worse."""
    wave = [0.0, 0.02, -0.02]
    rows = [row(4, s, 0.5 + wave[s]) for s in range(3)]
    rows += [row(8, s, 0.501 - wave[s]) for s in range(3)]
    cells = accuracy_cells(rows, BY_LINE)
    sheet = accuracy_table(cells, cells, Axis(values=(4, 8)))
    assert LESS not in str(sheet.rows)
    cells = accuracy_cells([*rows, *(row(16, s, 0.1 + wave[s]) for s in range(3))], BY_LINE)
    sheet = accuracy_table(cells, cells, Axis(values=(4, 8, 16)))
    assert [cell.split("\n")[0] for cell in sheet.rows[0][1:]] == ["0.500", "0.501", "0.100*"]


def test_a_single_cell_is_not_the_best_of_anything():
    cells = accuracy_cells([row(4, 0, 0.5), row(4, 1, 0.6)], BY_LINE)
    sheet = accuracy_table(cells, cells, Axis(values=(4,)))
    assert sheet.rows[0][1] == "0.550\n[0.000, 1.000]"


def test_settings_of_one_size_are_compared_as_sizes_are():
    """Paired on seeds: none is 0.1 less in each, opo 0.001 less or more."""
    settings = {"leave_one_out": 0.5, "none": 0.4, "opo": 0.5}
    rows = []
    for name, mean in settings.items():
        for s in range(4):
            noise = 0.002 * (-1) ** s if name == "opo" else 0.001 * (s % 2) * (name == "none")
            one = row(8, s, mean + 0.05 * s + noise) | {"setting": f"baseline={name}", "x": name}
            rows.append(one | {"series": one["setting"]})
    cells = accuracy_cells(rows, BY_SETTING)
    verdicts = {cell["setting"][9:]: cell["distinct"] for cell in cells}
    assert verdicts["none"] is True and not any(verdicts[name] for name in ("leave_one_out", "opo"))
    sheet = settings_table(cells)
    assert list(sheet.columns) == ["", "baseline", "accuracy", "difference", "verdict"]
    none = sheet.rows[1]
    assert none[1] == "none" and none[4] == "significantly less"
    assert float(none[3].split()[0]) == pytest.approx(-0.0995, abs=6e-4)


def test_mean_rewards_are_named_and_bounded_by_nothing():
    """-1/+1 of two seeds, -0.8 and -0.6: t_1 = 12.7 times 0.1, below -1; equal ones have no step
    to be rounded to. Beside an accuracy both are mean rewards, which is said.
    """
    signed = [row(4, 0, -0.8, quantity="mean reward"), row(4, 1, -0.6, quantity="mean reward")]
    (cell,) = accuracy_cells(signed, BY_LINE)
    assert (cell["quantity"], cell["mean_reward"]) == ("mean reward", pytest.approx(-0.7))
    half = 12.706205 * 0.1
    assert (cell["low"], cell["high"]) == pytest.approx((-0.7 - half, -0.7 + half), abs=1e-5)
    (pooled,) = pooled_cells([cell])
    assert (pooled["low"], pooled["high"]) == pytest.approx((cell["low"], cell["high"]))
    axis = Axis(values=(4, 8))
    sheet = accuracy_table([cell], [], axis)
    assert (sheet.name, sheet.title) == ("mean_reward", "Held-out mean reward")
    assert "mean reward" in budget_table(accuracy_cells(signed, BY_BUDGET)).title
    best = best_sentence(accuracy_cells(signed, BY_BUDGET))
    assert "mean reward" in best and "step 25" in best and "-0.700" in best

    both = accuracy_cells([*signed, row(8, 0, 0.4), row(8, 1, 0.5)], BY_LINE)
    assert [cell["quantity"] for cell in both] == ["mean reward", "accuracy"]
    sheet = accuracy_table(both, [], axis)
    assert sheet.title == "Held-out mean reward"
    assert any(note.startswith("Mean reward") for note in sheet.notes)
    (cell,) = accuracy_cells([row(4, 0, 0.4), row(4, 1, 0.5)], BY_LINE)
    assert accuracy_table([cell], [], axis).name == "accuracy"
