"""Rollouts that another policy wrote: scores with weighted tokens, and the study of them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from fakes import random_policy, random_rollouts
from pyarrow import parquet

from grpo_ustat.config.schema import ConfigError
from grpo_ustat.estimators.drift import drift_of
from grpo_ustat.estimators.token_weights import (
    CORRECTIONS,
    EXACT,
    TokenWeights,
    token_factors,
)
from grpo_ustat.measurements.base import Study
from grpo_ustat.measurements.off_policy import OFF_POLICY
from grpo_ustat.measurements.registry import sentences, tables
from grpo_ustat.mse import study as study_run
from grpo_ustat.mse.off_policy import weighted_part
from grpo_ustat.mse.pool import EqualRewards
from grpo_ustat.mse.scoring import score_sketches
from grpo_ustat.runs.folder import RunFolder
from grpo_ustat.runs.record import RunRecord

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from commands import compose  # noqa: E402
from test_exact_rollouts import rows_of, sampled, write  # noqa: E402

SMALL = ("debug=mse", "model=tiny_base", "study.questions=6", "launch.workers=1", "group_sizes=[2]")
PENALISED = ("objective=grpo", "baseline=group_std", "objective.beta=2.0")


def study(path, *words):
    config = compose("mse", *SMALL, *words)
    study_run.run(config, RunFolder(path, config))
    return json.loads((path / "result.json").read_text())


def numbers(row):
    keys = ("efficiency_same_g", "efficiency_best_g", "direction", "noise")
    return [row[f"{key}{end}"] or 0.0 for key in keys for end in ("", "_low", "_high")]


@pytest.mark.slow
def test_the_policy_that_wrote_them_is_at_no_distance(tmp_path):
    """Every ratio is 1: efficiencies are those of the first update, and nothing is lost."""
    objectives = "objectives=[trl_grpo,trl_dr_grpo,whole_sequence]"
    result = study(tmp_path / "run", objectives, "study.scored_by=embedded:tiny_base")
    found = result["off_policy"]
    assert (found["written_by"], found["policy"]) == ("tiny_base", "tiny_base")
    assert found["kl"] == pytest.approx(0, abs=1e-6)
    assert found["effective_tokens"] == pytest.approx(1, abs=1e-6)
    by_loss = {row["loss"]: row for row in found["losses"]}
    for row in result["losses"]:
        if row["loss"] != "trl_dr_grpo":  # whose direction is unbiased by theory on-policy alone
            np.testing.assert_allclose(numbers(by_loss[row["loss"]]), numbers(row), rtol=1e-4)
        assert by_loss[row["loss"]]["noise"] == pytest.approx(row["noise"], rel=1e-4)
    assert by_loss["whole_sequence"]["efficiency_same_g"] == pytest.approx(1, abs=1e-6)


@pytest.mark.slow(minutes=0.3)
def test_a_study_of_an_earlier_policys_rollouts(tmp_path, capsys):
    """It is said in the first lines, on the page and in two tables; what was scored is kept."""
    words = ("study.scored_by=embedded:tiny", "objective=trl_gspo", "objectives=[algorithm1]")
    result = study(tmp_path / "run", *words)
    found, printed = result["off_policy"], capsys.readouterr().out
    assert (
        found["kl_low"] > 0 and 0 < found["effective_completions"] < found["effective_tokens"] < 1
    )
    view = Study(RunRecord(tmp_path / "run"))
    first, *rest = sentences(view, [OFF_POLICY])
    assert "between tiny_base and tiny is" in first and "nats per token" in first
    assert all("that tiny_base wrote" in sentence for sentence in rest)
    assert " ".join(first.split()) in " ".join(printed.split())
    assert len(tables(view, [OFF_POLICY])) == 2
    page = (tmp_path / "run/report.html").read_text()
    assert "rollouts that tiny_base wrote" in page and "nats per token" in page
    marked = [path.stat().st_mtime_ns for path in sorted((tmp_path / "run").rglob("*.safetensors"))]
    (tmp_path / "run/result.json").unlink()
    assert study(tmp_path / "run", *words)["off_policy"] == found
    assert marked == [
        path.stat().st_mtime_ns for path in sorted((tmp_path / "run").rglob("*.safetensors"))
    ]


@pytest.mark.parametrize("weights", [
    TokenWeights("token", "clip", 0.2, 0.2, beta=0.1, kl_estimator="k3", kl_in="loss"),
    TokenWeights("sequence", "clip", 0.001, 0.001),
    TokenWeights(correction="token_mask", cap=1.1), EXACT,
], ids=lambda weights: f"{weights.level}-{weights.correction}")  # fmt: skip
def test_scores_are_the_gradients_of_weighted_log_probabilities(weights):
    """Every kind of every row by autograd, rows of which all tokens are clipped among them."""
    policy, earlier, anchor = (random_policy(seed=seed) for seed in range(3))
    rollouts = random_rollouts([3], group_size=5, longest=6)
    prompt, mask = rollouts.prompt_tokens[0], rollouts.mask_PGT[0]

    def logprobs(one, i):
        ids = [*prompt, *rollouts.tokens_PGT[0, i][mask[i]].tolist()]
        logits = one.model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.log_softmax(-1)[range(mask[i].sum()), ids[len(prompt) :]]
        return torch.nn.functional.pad(chosen, (0, mask.shape[1] - len(chosen)))

    own, old, reference = (
        np.array([logprobs(one, i).detach().numpy() for i in range(5)])
        for one in (policy, earlier, anchor)
    )
    config = compose("mse", *SMALL)
    sketch, _ = score_sketches(config.budget, policy)
    part = weighted_part(
        policy, rollouts, np.arange(5.0), config.sampler_options, sketch, weights, own, old,
        reference,
    )  # fmt: skip
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    vectors = []
    for kind in weights.kinds:
        factors = token_factors(weights, kind, own, old, mask, reference)
        for i in range(5):
            total = (logprobs(policy, i) * torch.tensor(factors[i])).sum()
            vectors.append(torch.cat([g.flatten() for g in torch.autograd.grad(total, parameters)]))
    vectors = torch.stack(vectors).numpy()
    if weights.level == "sequence":
        assert not vectors.any(axis=1).all()  # a row that is clipped
    np.testing.assert_allclose(part.gram_VV, vectors @ vectors.T, rtol=1e-8, atol=1e-10)
    ratios = np.exp((own - old) * mask)[mask]
    share = part.drift[0] ** 2 / (part.drift[1] * part.drift[2])
    assert share == pytest.approx(ratios.sum() ** 2 / (ratios @ ratios * mask.sum()))


def test_ratios_beyond_numbers_are_refused_in_a_line():
    """Two whole completions whose ratio is e^800, without a warning of numpy's."""
    policy, rollouts = random_policy(), random_rollouts([3], group_size=2, longest=4)
    config, own = compose("mse", *SMALL), np.zeros((2, 4))
    sketch, _ = score_sketches(config.budget, policy)
    with pytest.raises(ConfigError, match="log ratio up to .*use an earlier study.scored_by"):
        weighted_part(
            policy, rollouts, np.arange(2.0), config.sampler_options, sketch, EXACT, own,
            own - 800.0, own,
        )  # fmt: skip


def test_a_small_effective_share_has_no_lower_end():
    """Few weights decide it; the larger ones of the law are not drawn. Log-normal weights: the
    share is exp(-sigma^2).
    """
    rng, found = np.random.default_rng(0), {}
    for share in (0.9, 0.1):
        log_PN = np.sqrt(-np.log(share)) * rng.normal(size=(60, 16))
        top_P = log_PN.max(axis=1)
        scaled_PN = np.exp(log_PN - top_P[:, None])
        sums = (scaled_PN.sum(axis=1), np.square(scaled_PN).sum(axis=1))
        ones = np.ones(60)
        found[share] = drift_of(np.column_stack([ones, ones, ones, top_P, *sums, 0 * ones]), 16)
        weights = np.exp(log_PN)
        by_hand = weights.sum() ** 2 / np.square(weights).sum() / weights.size
        assert found[share].completions.estimate == pytest.approx(by_hand)
    assert 0.8 < found[0.9].completions.low < 0.9 < found[0.9].completions.high
    assert found[0.1].completions.low == 0 and found[0.1].completions.high > 0.1


@pytest.mark.slow(minutes=0.3)
@pytest.mark.parametrize("words, changes", [
    ((), True),
    (("objective.kl_estimator=k2",), True),
    (("objective.kl_estimator=k1", "objective.kl_in=reward"), True),
    (("study.reference=embedded:tiny_base",), False),
], ids=["k3", "k2", "k1 in the reward", "no distance"])  # fmt: skip
def test_a_penalty_from_a_reference(tmp_path, words, changes):
    """It changes a loss's efficiency, unless the reference is the policy itself."""
    reference = ("study.reference=embedded:tiny", *words)
    result = study(tmp_path / "run", *PENALISED, *reference)
    (plain,), (row,) = result["losses"], result["off_policy"]["losses"]
    assert np.allclose(numbers(plain), numbers(row), rtol=1e-4) != changes
    (said,) = sentences(Study(RunRecord(tmp_path / "run")), [OFF_POLICY])
    assert "with its penalty" in said


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Rollouts of the model with log-probabilities of a sampler that is a little off."""
    rollouts, rewards_PG, _ = sampled()
    noise = np.random.default_rng(0).normal(scale=0.1, size=rollouts.logprobs_PGT.shape)
    off = replace(rollouts, logprobs_PGT=rollouts.logprobs_PGT + noise * rollouts.mask_PGT)
    path = tmp_path_factory.mktemp("logged") / "r.parquet"
    return write(path, rows_of(off, rewards_PG))


@pytest.mark.slow(minutes=0.3)
def test_corrections_of_a_samplers_gap(tmp_path, logged):
    """A row for none and for each of them, against exact ratios; a gap that a study without
    corrections refuses.
    """
    with pytest.raises(ConfigError, match="logged ones by 0.0"):
        study(tmp_path / "without", f"pool={logged}", "objective=trl_grpo")
    words = (f"pool={logged}", "objective=trl_grpo", f"study.corrections=[{','.join(CORRECTIONS)}]")
    found = study(tmp_path / "run", *words)["off_policy"]
    names = ["trl_grpo", *(f"trl_grpo {name}" for name in CORRECTIONS)]
    assert [row["loss"] for row in found["losses"]] == names
    assert found["question"] == "gap" and 0 < found["effective_completions"] < 1
    noises = {row["noise_low"] for row in found["losses"]}
    assert len(noises) > 3  # no ratio of 48 short completions is beyond 3 of each token


@pytest.mark.slow
def test_a_policy_whose_answers_are_all_judged_alike_is_refused(tmp_path, monkeypatch):
    """In one line, since the study itself has a gradient."""

    def equal(config, prompts, folder, completions=None):
        raise EqualRewards(prompts, [])

    monkeypatch.setattr("grpo_ustat.mse.off_policy.build_pool", equal)
    with pytest.raises(ConfigError, match="so there is no gradient to estimate"):
        study(tmp_path / "run", "study.scored_by=embedded:tiny_base")


REFUSED = {
    "no such checkpoint": (("study.scored_by=./nowhere",),
                           "study.scored_by=./nowhere: there is no folder"),
    "no such name": (("study.scored_by=nothere",), "study.scored_by=nothere: there is no folder"),
    "no prefix": (("study.scored_by=tiny",),
                  "or embedded:NAME, such as study.scored_by=embedded:tiny"),
    "no such reference": (("study.reference=embedded:huge", *PENALISED),
                          "unknown study.reference"),
    "a reference of nothing": (("study.reference=embedded:tiny",), "no loss has a KL penalty"),
    "corrections of our own rollouts": (("study.corrections=[token_mask]",),
                                        "use pool=FILE.parquet with a column logprobs"),
    "no correction": (("study.corrections=[tokens]",), "token_truncate"),
    "twice": (("study.corrections=[token_mask,token_mask]",), "study.corrections"),
}  # fmt: skip


@pytest.mark.parametrize("words, line", REFUSED.values(), ids=REFUSED)
def test_what_makes_no_sense_is_refused(words, line):
    with pytest.raises(ConfigError, match=line.replace("[", r"\[")):
        compose("mse", *SMALL, *words)


def test_a_policy_that_cannot_be_loaded_is_named_by_its_own_field(tmp_path):
    with pytest.raises(
        ConfigError, match="could be loaded from study.scored_by=org/nothere: it is"
    ):
        study(tmp_path / "run", "study.scored_by=org/nothere")
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.slow
def test_what_a_file_lacks_is_refused(tmp_path, logged):
    rows = parquet.read_table(logged).to_pylist()
    with pytest.raises(ConfigError, match="study.scored_by=.* with pool="):
        compose("mse", *SMALL, f"pool={logged}", "study.scored_by=embedded:tiny")
    with pytest.raises(ConfigError, match="with loss_type=vespo"):
        compose(
            "mse", *SMALL, f"pool={logged}", "objective=trl_vespo", "study.corrections=[token_mask]"
        )
    bare = tmp_path / "bare.parquet"
    without = [{key: x for key, x in row.items() if key != "logprobs"} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(without), bare)
    with pytest.raises(ConfigError, match="need the log-probabilities of the sampler"):
        study(tmp_path / "run", f"pool={bare}", "study.corrections=[token_mask]")
    result = study(
        tmp_path / "penalty", f"pool={bare}", "study.reference=embedded:tiny", *PENALISED
    )
    assert result["off_policy"]["question"] == "penalty"  # how far the sampler is, nobody knows
