"""The comparison with TRL: by gradients that TRL once made, where it is installed by TRL itself."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from grpo_ustat.config.objective import OBJECTIVES
from grpo_ustat.estimators.row_weights import row_weights
from grpo_ustat.records import BaselineContext

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "scripts/benchmarks"
RECORD = json.loads((ROOT / "tests/data/trl_gradients.json").read_text())


@pytest.fixture(scope="module", autouse=True)
def scripts():
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def compare():
    import compare_trl

    return compare_trl


@pytest.fixture(scope="module")
def bench():
    from timed import train

    return train


def softmax_gradient(logits, weigh):
    """Gradient at the logits of `weigh(log-probabilities of 3 two-token completions)`."""
    leaf = logits.clone().requires_grad_()
    weigh(torch.log_softmax(leaf, dim=-1)).backward()
    return leaf.grad


def test_the_factors_are_those_of_the_written_losses(compare):
    """TRL's losses, written out for a group of 3 completions of 2, 1 and 2 tokens, L = 4."""
    logits = torch.tensor([[0.3, -0.2, 0.1], [0.5, 0.4, -1.0]], dtype=torch.float64)
    tokens, mask = torch.tensor([[0, 1], [2, 0], [1, 1]]), torch.tensor([[1, 1], [1, 0], [1, 1]])
    rewards = torch.tensor([1.0, 0.25, 0.5], dtype=torch.float64)
    group, longest = 3, 4
    centred = rewards - rewards.mean()
    leave_one_out = rewards - (rewards.sum() - rewards) / (group - 1)

    def chosen(logp):
        return logp[torch.arange(2), tokens] * mask

    def ours(logp):
        return -(leave_one_out * chosen(logp).sum(1)).sum() / group

    def group_mean(logp):
        return -(centred * chosen(logp).sum(1)).sum() / group

    def rloo(logp):
        total = chosen(logp).sum(1)
        return -((total - total.detach()).exp() * leave_one_out).mean()

    def dr_grpo(logp):
        ratio = (chosen(logp) - chosen(logp).detach()).exp()
        return -(ratio * centred[:, None] * mask).sum() / (group * longest)

    wanted = {
        "ours": (ours, rloo, 1.0),
        "centred": (ours, dr_grpo, compare.per_token_and_centred(group, longest)),
        "group_mean": (group_mean, dr_grpo, compare.per_token(group, longest)),
    }
    for mine, theirs, factor in wanted.values():
        pair = [{"logits": softmax_gradient(logits, f)} for f in (mine, theirs)]
        assert compare.largest_difference(*pair, factor)[0] < 1e-15
        assert compare.largest_difference(*pair, factor * 1.01)[0] == pytest.approx(0.01)
        assert compare.scale(*pair) == pytest.approx(factor, rel=1e-14)


@pytest.mark.nightly
def test_every_setting_is_a_configuration_and_has_its_own_name(compare):
    for setting in compare.SETTINGS:
        compare.configured("float64", setting.ours)
    assert len({setting.name for setting in compare.SETTINGS}) == len(compare.SETTINGS)


def recorded(setting):
    """TRL's gradient in short, as tests/data has it."""
    return np.array(RECORD["projections"][setting.name])


def in_short(compare, gradient):
    """The same of a gradient of ours or of the living TRL, parameters x (norm, two products)."""
    short = compare.projections(gradient)
    assert list(short) == RECORD["parameters"]
    return np.array(list(short.values()))


def first_of_each_objective(settings):
    """And the first control of each."""
    return {(setting.ours[0], setting.equal): setting for setting in reversed(settings)}.values()


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(first_of_each_objective, marks=pytest.mark.slow(minutes=0.4), id="first"),
        pytest.param(list, marks=pytest.mark.nightly(minutes=1), id="every"),
    ],
)
def test_our_gradients_are_those_recorded_of_trl(compare, chosen):
    """Of the objectives on and off the sampling policy, and of the presets; controls differ."""
    rollouts = compare.common_start(2, "float64")
    told = compare.without_paths(compare.job(compare.SETTINGS, rollouts, "float64"))
    assert json.loads(json.dumps(told)) == RECORD["job"], "record anew: " + RECORD["source"]
    for setting in chosen(compare.SETTINGS):
        gradient, _ = compare.our_gradient(setting, rollouts, "float64")
        ours, factor = in_short(compare, gradient), setting.factor(compare.GROUP, compare.LENGTH)
        largest = (np.abs(ours - factor * recorded(setting)) / ours[:, :1]).max()
        assert (largest < 1e-9) == setting.equal, (setting.name, largest)
    assert RECORD["projections"].keys() == {setting.name for setting in compare.SETTINGS}
    assert {f"objective={word}" for word in OBJECTIVES if word.startswith("trl_")} == {
        setting.ours[0] for setting in compare.PRESETS
    }


@pytest.mark.slow(minutes=0.3)
def test_row_weights_times_scores_are_the_recorded_gradients_of_trl(compare):
    """`sum_i W_i s_i` of every preset whose tokens all count, with scores by autograd; some
    completions are cut and have no weight where they are masked.
    """
    found = compare.common_start(2, "float64")
    rollouts, count = found.rollouts, found.rewards_PG.size
    assert 0 < rollouts.ended_PG.sum() < count
    products_NK2 = np.array([in_short(compare, s)[:, 1:] for s in scores(compare, rollouts)])
    checked = 0
    for setting in compare.PRESETS:
        budget = f"budget.rollouts={count}"
        config = compare.configured("float64", (*setting.ours, budget))
        objective, baseline = config.objective, config.baseline
        if objective.top_entropy_quantile < 1:
            continue
        (weight_PG,) = row_weights(
            objective.loss(baseline, compare.LENGTH),
            found.rewards_PG,
            BaselineContext(lengths_PG=rollouts.lengths_PG),
            rollouts.ended_PG,
            compare.micro_batch_rows(count),
        )
        theirs = setting.factor(compare.GROUP, compare.LENGTH) * recorded(setting)
        ours = -np.tensordot(weight_PG.ravel(), products_NK2, axes=1)  # the gradient of a loss
        assert (np.abs(ours - theirs[:, 1:]) / theirs[:, :1]).max() < 1e-9, setting.name
        checked += 1
    assert checked == len(compare.PRESETS) - 5


def scores(compare, rollouts):
    """The gradient of each completion's summed log-probabilities, one at a time."""
    model = compare.load_policy(compare.MODEL, dtype="float64").model
    groups = zip(rollouts.prompt_tokens, rollouts.tokens_PGT, rollouts.lengths_PG, strict=True)
    with compare.InDouble():
        for prompt, tokens_GT, lengths_G in groups:
            for tokens, length in zip(tokens_GT, lengths_G, strict=True):
                answer = torch.tensor(tokens[:length], dtype=torch.int64)
                ids = torch.cat([torch.tensor(prompt, dtype=torch.int64), answer])[None]
                logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
                model.zero_grad()
                logits.log_softmax(-1).gather(1, answer[:, None]).sum().backward()
                yield {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.nightly(minutes=1)
def test_the_living_trl_makes_the_recorded_gradients(compare):
    pytest.importorskip("trl", reason='TRL is not installed: pip install -e ".[trl]"')
    rollouts = compare.common_start(2, "float64")
    living = compare.trl_gradients(compare.SETTINGS, rollouts, "float64", Path(sys.executable))
    for setting, gradient in zip(compare.SETTINGS, living, strict=True):
        theirs = in_short(compare, gradient)
        assert (np.abs(theirs - recorded(setting)) < 1e-9 * theirs[:, :1]).all(), setting.name


@pytest.mark.nightly
def test_our_side_ends_with_a_gradient_of_every_parameter(compare, monkeypatch):
    """Moved weights, clipping and a reference model each change it; the factor is of one form."""
    monkeypatch.setattr(compare, "LENGTH", 12)
    settings = {setting.name: setting for setting in compare.SETTINGS}
    found = compare.common_start(2, "float64")
    names = ("algorithm1 = RLOO", "group_mean = dr_grpo", "k1 in the reward = RLOO, moved")
    plain, mean, moved = [compare.our_gradient(settings[n], found, "float64")[0] for n in names]
    assert compare.largest_difference(plain, mean, compare.GROUP / (compare.GROUP - 1))[0] < 1e-12
    assert compare.largest_difference(plain, moved, 1.0)[0] > 0.01
    told = compare.job(compare.SETTINGS, found, "float64")
    lengths = [[len(tokens) for tokens in p["completions"]] for p in told["prompts"]]
    assert lengths == found.rollouts.lengths_PG.tolist() and json.loads(json.dumps(told)) == told


def test_the_largest_difference_names_its_parameter(compare):
    ours = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([2.0])}
    theirs = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0])}
    assert compare.largest_difference(ours, theirs, 1.0) == (0.5, "b")
    with pytest.raises(ValueError, match="only one side has"):
        compare.largest_difference(ours, {"a": ours["a"]}, 1.0)


def test_a_control_must_differ(compare):
    same = compare.Setting("same", (), "grpo", {})
    control = compare.Setting("control", (), "grpo", {}, equal=False)
    assert same.fits(1e-12, "float64") and not same.fits(1e-9, "float64")
    assert control.fits(1e-2, "float64") and not control.fits(1e-12, "float64")


def test_float64_throughout():
    from both_sides import InDouble

    x = torch.tensor([1.0, 2.0**-40], dtype=torch.float64)
    assert x.float().sum() != x.sum()
    with InDouble():
        assert x.float().sum() == x.sum() and torch.zeros(2).dtype == torch.float64
        assert torch.softmax(x, -1, dtype=torch.float32).dtype == torch.float64
    assert torch.zeros(2).dtype == torch.float32


def test_drawn_rewards_leave_no_advantage_zero():
    from both_sides import DrawnRewards

    drawn = DrawnRewards(0, ["quiet"])
    loud = np.array([drawn.draw("loud") for _ in range(8)])
    assert len(set(loud)) == 8 and (abs(loud - loud.mean()) > 0).all()
    assert [drawn.draw("quiet") for _ in range(3)] == [0, 0, 0]
    assert DrawnRewards(0, []).draw("loud") == loud[0] != DrawnRewards(1, []).draw("loud")


@pytest.mark.nightly
def test_peak_memory_is_this_process_own():
    from both_sides import peak_memory

    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import both_sides; "
    code += "before = both_sides.peak_memory('cpu'); x = b'1' * 100_000_000; "
    code += "print(before, both_sides.peak_memory('cpu'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert 0.9e8 < after - before < 1.2e8 and before < peak_memory("cpu")


def test_table_of_hand_made_measurements(capsys):
    """Ratios are medians over turns of the ratio to the first program in the same turn."""
    import speed

    def turns(*seconds, peak):
        rows = [{"wall": a, "cpu": 2 * a, "generate": b, "tokens": 64} for a, b in seconds]
        return [{"rows": [row], "peak": peak * 10**9, "above": 10**8} for row in rows]

    measured = {
        "ours 2048": turns((3.0, 1.0), (5.0, 1.0), peak=1),
        "TRL 8c": turns((9.0, 2.0), (25.0, 4.0), peak=4),
    }
    speed.report(measured)
    lines = {line[:9].strip(): line[9:].split() for line in capsys.readouterr().out.splitlines()}
    wanted = "4.00 3.00 - 5.00 1.00 8.00 6.00 - 10.00 1.00 1000 100 1 64"
    assert lines["ours 2048"] == wanted.split()
    wanted = "17.00 9.00 - 25.00 4.00 34.00 18.00 - 50.00 4.00 4000 100 3 64"
    assert lines["TRL 8c"] == wanted.split()


def test_a_micro_batch_is_a_number(bench):
    assert bench.micro_batch("16c") == "16c"
    for wrong in ("c", "0", "8d", "-1"):
        with pytest.raises(argparse.ArgumentTypeError):
            bench.micro_batch(wrong)


def asked_of(model, **options):
    """Two steps of 2 prompts x 4 completions."""
    return argparse.Namespace(
        model=str(model), dtype="float32", device="cpu", threads=1, group_size=4, prompts=2,
        length=8, warm=1, repeats=1, learning_rate=1e-6, **options,
    )  # fmt: skip


@pytest.mark.nightly
def test_both_sides_see_the_same_questions(bench, tmp_path):
    asked = asked_of(tmp_path, bf16=False)
    (tmp_path / "config.json").write_text("{}")
    save_file({"weight": np.zeros(1)}, tmp_path / "model.safetensors")
    texts = [f"question {i}" for i in range(9)]
    ours, theirs = [bench.job_of(f"{side} 8", asked, texts, 3) for side in ("ours", "TRL")]
    config, given = bench.our_configuration(ours), bench.Questions(ours).given
    steps = [bench.trainer.choose_prompts(config, given, step) for step in range(2)]
    assert [p.id for step in steps for p in step] == [p["id"] for p in theirs["prompts"]]


@pytest.mark.nightly
def test_our_turn_goes_through_the_trainer(bench, tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"question": f"{i}+1="}) + "\n" for i in range(9)))
    words = ["--prompts", "2", "--group-size", "4", "--length", "8", "--warm", "1", "--bf16"]
    words += ["--model", ROOT / "grpo_ustat/assets/tiny_base", "--questions", questions]
    command = [sys.executable, BENCHMARKS / "speed.py", "train", *words, "--inside", "ours 64"]
    done = subprocess.run(command, check=True, timeout=300, capture_output=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found["rows"]) == 2 and found["peak"] > 10**8
    assert all(0 < r["generate"] < r["wall"] and 8 <= r["tokens"] <= 64 for r in found["rows"])


@pytest.mark.nightly
def test_wrong_arguments_are_refused_in_one_line(tmp_path, monkeypatch, capsys):
    import speed

    def refused(*arguments):
        monkeypatch.setattr(sys, "argv", ["speed.py", "train", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            speed.main()
        assert isinstance(ended.value.code, str)  # printed by Python, which then ends with 1
        assert "\n" not in ended.value.code and capsys.readouterr() == ("", "")
        return ended.value.code

    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question": "1+1"}))
    assert "--model FOLDER and --questions FILE are needed" in refused()
    given = ("--questions", questions, "--model")
    assert "not a folder with a tokenizer.json" in refused(*given, tmp_path)
    (tmp_path / "tokenizer.json").touch()
    assert "--trl 7 does not divide 4 x 8 = 32" in refused(*given, tmp_path, "--trl", "7")
    assert "has 1 questions, 12 are needed" in refused(*given, tmp_path)


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path):
    from trl_environment import environment

    (tmp_path / "mine.txt").touch()
    with pytest.raises(SystemExit, match="is not a virtual environment"):
        environment(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
