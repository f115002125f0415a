"""Advice from scalars: bounds that hold the truth, and differences."""

import json

import numpy as np
import pytest

from grpo_ustat.advise.scalar_bounds import zero_variance
from grpo_ustat.advise.scalars import scalar_advice
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.logs.scalars import read_scalars
from grpo_ustat.pages.advice import UNKNOWN

SIZE, GROUPS, STEPS = 8, 16, 60
# Success probabilities of the prompts; the mean is 0.5, and the share at G = 8 is 0.43.
P = np.array([0.1, 0.9])


def rewards(seed=0, p=P, values=(0.0, 1.0), steps=STEPS, size=SIZE, groups=GROUPS):
    """Rewards [steps, groups, size]; with several values above 0, each has the same chance."""
    generator = np.random.default_rng(seed)
    chances = generator.choice(p, size=(steps, groups, 1))
    right = generator.uniform(size=(steps, groups, size)) < chances
    return np.where(right, generator.choice(values[1:], size=right.shape), values[0])


def trl_rows(batches, per_row=1):
    """Rows of TRL: averages over `per_row` steps of means in float32."""
    steps = len(batches)
    flat = batches.reshape(steps, -1).astype(np.float32)
    columns = {
        "reward": flat.mean(axis=1),
        "reward_std": flat.std(axis=1, ddof=1),
        "frac_reward_zero_std": (batches == batches[..., :1]).all(axis=2).mean(axis=1),
        "completions/clipped_ratio": np.full(steps, 0.25),
        "grad_norm": np.ones(steps),
    }
    rows = {
        name: values.astype(float).reshape(-1, per_row).mean(axis=1)
        for name, values in columns.items()
    }
    return [
        {"step": (row + 1) * per_row} | {name: float(rows[name][row]) for name in rows}
        for row in range(steps // per_row)
    ]


def written(folder, rows, name="run", **state):
    (folder / name).mkdir(exist_ok=True)
    content = {"log_history": rows} | state
    (folder / name / "trainer_state.json").write_text(json.dumps(content))
    (run,) = read_scalars(folder / name)
    return run


def lines_run(folder, rows, name="log"):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run,) = read_scalars(folder / name)
    return run


def true_share(size, p=P):
    return float(np.mean(p**size + (1 - p) ** size))


def text_of(advice):
    return "\n".join([advice.sentence, *advice.details, advice.next])


def test_bounds_of_a_simulated_run_hold_the_truth(tmp_path):
    advice = scalar_advice([written(tmp_path, trl_rows(rewards(1)))], SIZE)
    numbers = advice.numbers
    assert advice.verdict == UNKNOWN
    low, high = numbers["zero_variance_share_low"], numbers["zero_variance_share_high"]
    assert low < true_share(SIZE) < high
    assert high - low < 0.2
    for size in (2, 4, 16, 32, 64):
        low, high = numbers["zero_variance_bounds"][str(size)]
        assert low <= true_share(size) <= high


def test_cost_of_a_useful_rollout_is_stated(tmp_path):
    advice = scalar_advice([written(tmp_path, trl_rows(rewards()))], SIZE)
    share = advice.numbers["zero_variance_share"]
    assert f"{1 / (1 - share):.1f} [" in advice.sentence


@pytest.mark.parametrize(
    "values", [(0.0, 0.1, 1.0), (0.0, 1.0, 2.0), (-1.0, 1.0), (0.0, 0.5)], ids=str
)
def test_bounds_hold_for_any_rewards(tmp_path, values):
    run = written(tmp_path, trl_rows(rewards(values=values)))
    (low, high) = scalar_advice([run], SIZE).numbers["zero_variance_bounds"]["4"]
    batches = rewards(1, values=values, steps=2000, size=4)
    assert low <= (batches == batches[..., :1]).all(axis=2).mean() <= high


def test_a_run_without_variance_in_its_rewards_shows_nothing(tmp_path):
    run = written(tmp_path, trl_rows(np.zeros((20, 4, 8))))
    share = zero_variance(run)
    assert share is not None and share.share.estimate == 1
    assert share.share.low < 0.95


def test_share_of_0_at_all_steps_may_be_a_setting(tmp_path):
    rows = [row | {"frac_reward_zero_std": 0.0} for row in trl_rows(rewards())]
    advice = scalar_advice([written(tmp_path, rows)], SIZE)
    assert advice.numbers["zero_variance_bounds"] == {}
    assert "scale_rewards" in text_of(advice)


def test_without_group_size_no_bounds(tmp_path):
    advice = scalar_advice([written(tmp_path, trl_rows(rewards()))])
    assert advice.numbers["zero_variance_bounds"] == {}
    assert "for example num_generations=" in text_of(advice)


def test_few_rows_have_no_interval(tmp_path):
    advice = scalar_advice([written(tmp_path, trl_rows(rewards(steps=4)))], SIZE)
    assert advice.numbers["zero_variance_bounds"] == {}
    low, high = (advice.numbers[f"zero_variance_share_{end}"] for end in ("low", "high"))
    assert (low, high) == (0, 1)


def prime_rows(batches):
    agent = "train/agg/all/solver"
    return [
        {
            "step": step, f"{agent}/reward/mean": float(batch.mean()),
            f"{agent}/reward/min": float(batch.min()), f"{agent}/reward/max": float(batch.max()),
            f"{agent}/solved_none": float((batch == 0).all(axis=1).mean()),
            f"{agent}/solved_all": float((batch == 1).all(axis=1).mean()),
            "progress/rollouts": batch.size, "progress/tasks": len(batch), "optim/grad_norm": 1.0,
        }
        for step, batch in enumerate(batches)
    ]  # fmt: skip


def test_prime_rl_shows_its_sizes_and_rewards(tmp_path):
    run = lines_run(tmp_path, prime_rows(rewards()))
    numbers = scalar_advice([run]).numbers
    assert numbers["num_generations"] == SIZE
    assert numbers["zero_variance_assumes_binary"]
    for size in (2, 16):
        low, high = numbers["zero_variance_bounds"][str(size)]
        assert low <= true_share(size) <= high


def nemo_rows(batches, **more):
    others = (batches.sum(axis=2, keepdims=True) - batches) / (batches.shape[2] - 1)
    return [
        {
            "step": step, "train/reward": float(batch.mean()), "train/grad_norm": 1.0,
            "train/baseline_reward/pct_0": 100 * float((baseline == 0).mean()),
            "train/baseline_reward/pct_1": 100 * float((baseline == 1).mean()),
        } | more
        for step, (batch, baseline) in enumerate(zip(batches, others, strict=True))
    ]  # fmt: skip


def test_leave_one_out_baselines_count_for_a_smaller_group(tmp_path):
    """NeMo-RL logs the share of baselines 0 and 1, and each is a mean of G - 1 rewards."""
    advice = scalar_advice([lines_run(tmp_path, nemo_rows(rewards(steps=200)))], SIZE)
    numbers = advice.numbers
    assert numbers["zero_variance_size"] == SIZE - 1
    low, high = numbers["zero_variance_share_low"], numbers["zero_variance_share_high"]
    assert low < true_share(SIZE - 1) < high
    assert low > true_share(SIZE)
    assert numbers["zero_variance_assumes_binary"]
    low, high = numbers["zero_variance_bounds"][str(SIZE)]
    assert low <= true_share(SIZE) <= high


def test_dynamic_sampling_leaves_no_bounds(tmp_path):
    name = "train/dynamic_sampling_num_gen_batches"
    advice = scalar_advice([lines_run(tmp_path, nemo_rows(rewards(), **{name: 2.0}))], SIZE)
    assert advice.numbers["zero_variance_bounds"] == {}
    assert "generated 2 batches" in text_of(advice)


def test_scalars_of_verl_are_read(tmp_path):
    rows = [{"step": step, "data": {"critic/score/mean": 0.5, "actor/grad_norm": float(step > 2)}}
            for step in range(1, 13)]  # fmt: skip
    advice = scalar_advice([lines_run(tmp_path, rows)])
    text = text_of(advice)
    assert "0 in 2 of 12 rows" in text
    assert advice.next.startswith("grpo-ustat advise")
    assert "zero_variance_share" not in advice.numbers


def test_a_typed_group_size_must_agree_with_the_log(tmp_path):
    run = lines_run(tmp_path, prime_rows(rewards()))
    with pytest.raises(ConfigError, match=f"num_generations=4.*{SIZE}"):
        scalar_advice([run], 4)


def seeds_of(folder, setting, difference, spread, count=4):
    runs = []
    for seed in range(count):
        shift = np.random.default_rng([seed, len(setting)]).normal(0, spread)
        batches = rewards(seed, p=np.array([0.5 + difference + shift]))
        runs.append(written(folder, trl_rows(batches), f"{setting}-seed{seed}"))
    return runs


def test_settings_are_compared_by_seeds(tmp_path):
    runs = seeds_of(tmp_path, "a", 0.2, 0.01) + seeds_of(tmp_path, "bb", 0.0, 0.01)
    advice = scalar_advice(runs)
    assert "4 common seeds" in advice.sentence
    assert "more than the noise between seeds" in advice.sentence
    assert "not more" not in advice.sentence
    assert len(advice.numbers["runs"]) == 8


def test_an_undecided_difference_states_the_seeds_for_one_point(tmp_path):
    runs = seeds_of(tmp_path, "a", 0.0, 0.05) + seeds_of(tmp_path, "bb", 0.0, 0.05)
    sentence = scalar_advice(runs).sentence
    assert "within the noise between seeds" in sentence
    assert "one percentage point" in sentence


def test_one_run_of_each_setting_says_nothing_about_seeds(tmp_path):
    runs = [
        written(tmp_path, trl_rows(rewards(seed, p=np.array([p]))), name)
        for seed, (name, p) in enumerate([("a", 0.4), ("b", 0.6)])
    ]
    sentence = scalar_advice(runs).sentence
    assert "-0.2" in sentence
    assert "the variation between seeds is unknown" in sentence


def test_several_runs_have_a_row_each_within_80_columns(tmp_path):
    runs = seeds_of(tmp_path, "a-long-name-of-a-setting", 0.0, 0.05, 2)
    head, *rows = scalar_advice(runs).details[: 1 + len(runs)]
    assert head.split()[:2] == ["run", "steps"]
    assert len(rows) == len(runs) > 1
    for run, row in zip(runs, rows, strict=True):
        assert row.startswith(run.name[:5]) and len(row) <= 80
        low, high = row.split("[")[1].split("]")[0].split(", ")
        assert float(low) < run.fields["reward"].mean() + 0.1 and float(high) > float(low)


def test_nothing_heavy_is_imported():
    import subprocess
    import sys

    code = (
        "import sys, grpo_ustat.advise.scalars, grpo_ustat.logs.scalars\n"
        "print([m for m in ('torch', 'transformers', 'hydra', 'wandb', 'tensorboard')"
        " if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


def test_random_logs_end_in_advice_or_one_line(tmp_path):
    generator = np.random.default_rng(5)
    names = (
        "reward", "reward_std", "frac_reward_zero_std", "grad_norm", "kl", "rollouts",
        "completions/clipped_ratio", "critic/score/mean", "frac_completions_skipped",
    )  # fmt: skip
    odd = [None, True, -1, 0, 2, 1e308, "NaN", "x", [], {}, 1e-320, 10**400]
    outcomes = set()
    for _ in range(60):
        rows = []
        for step in range(generator.integers(1, 14)):
            row = {name: float(generator.integers(3)) / 2 for name in names}
            row = {name: value for name, value in row.items() if generator.random() < 0.6}
            if generator.random() < 0.1:
                row[str(generator.choice(names))] = odd[generator.integers(len(odd))]
            rows.append(row | {"step": step})
        try:
            run = lines_run(tmp_path, rows)
            scalar_advice([run], SIZE)
            scalar_advice([run, run], SIZE)
            outcomes.add("advice")
        except ConfigError as error:
            assert "\n" not in str(error)
            outcomes.add("error")
    assert outcomes == {"advice", "error"}
