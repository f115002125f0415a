"""Slow, obviously right versions. They share no code with the package's fast paths."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from scipy import stats

BASELINE_OPTIONS = {  # of every baseline that has any
    "constant": {"value": 0.3},
    "running_mean": {"decay": 0.9},
    "critic": {"decay": 0.9, "ridge": 1.0},
    "group_std": {"epsilon": 1e-4},
    "group_std_jackknife": {"epsilon": 1e-4},
    "leave_one_out_std": {"epsilon": 0.1},
    "quantile": {"level": 0.4, "epsilon": 1e-4},
    "pods": {"share": 0.6, "epsilon": 1e-4},
    "length_weighted": {"power": 0.75, "epsilon": 1e-4},
    "ebpo": {"epsilon": 1e-8},
    "gdpo": {"epsilon": 1e-4},
    "maxrl": {"epsilon": 1e-4},
    "batch_std": {"epsilon": 1e-4},
    "reinforce_pp": {"epsilon": 1e-8},
    "reinforce_pp_baseline": {"epsilon": 1e-8},
    "james_stein": {"epsilon": 1e-8},
    "beta": {"minimum": 0.0, "maximum": 1.0, "ceiling": 1e6},
}


def softmax_policy(logits):
    """Probabilities and score vectors of a softmax over a few actions; theta is the logits."""
    weights = [math.exp(x) for x in logits]
    p = [w / sum(weights) for w in weights]
    scores = [[(1.0 if k == y else 0.0) - p[k] for k in range(len(p))] for y in range(len(p))]
    return p, scores


def plain_advantages(name, group_rewards, value):
    """Advantages of one group, written out."""
    size = len(group_rewards)
    result = []
    for i, z in enumerate(group_rewards):
        others = [x for j, x in enumerate(group_rewards) if j != i]
        baseline = {
            "none": 0.0,
            "leave_one_out": sum(others) / (size - 1) if size > 1 else 0.0,
            "group_mean": sum(group_rewards) / size,
            "oracle": value,
        }[name]
        result.append(z - baseline)
    return result


def mean_of(values):
    return sum(values) / len(values)


def variance_of(values, ddof=1):
    centre = mean_of(values)
    return sum((x - centre) ** 2 for x in values) / (len(values) - ddof)


def token_whitened(rows, lengths, epsilon):
    """Every token of every completion carries its completion's value; standardise the tokens."""
    tokens = [
        x
        for row, longs in zip(rows, lengths, strict=True)
        for x, n in zip(row, longs, strict=True)
        for _ in range(n)
    ]
    centre, spread = mean_of(tokens), math.sqrt(variance_of(tokens) + epsilon)
    return [[(x - centre) / spread for x in row] for row in rows]


def beta_weights(means, ceiling):
    """1 / Beta density at each mean."""
    alpha = beta = 1.0
    if len(means) > 1 and variance_of(means) > 0:
        centre = mean_of(means)
        factor = centre * (1 - centre) / variance_of(means) - 1
        alpha, beta = max(1, 1 + factor * centre / 3), max(1, 1 + factor * (1 - centre) / 3)
    density = [stats.beta.pdf(m, alpha, beta) for m in means]
    return [min(1 / d, ceiling) if d > 0 else ceiling for d in density]


def james_stein_row(rewards, p, epsilon):
    """Advantages of prompt p's group."""
    others = [row for k, row in enumerate(rewards) if k != p]
    means = [mean_of(row) for row in others]
    noise = mean_of([variance_of(row) / len(row) for row in others])
    factor = 1 - 1 / len(rewards)
    shrink = factor * noise / (noise + variance_of(means, ddof=0) + epsilon)
    result = []
    for i, r in enumerate(rewards[p]):
        own = mean_of([x for j, x in enumerate(rewards[p]) if j != i])
        result.append(r - (1 - shrink) * own - shrink * mean_of(means))
    return result


def standardised(row, epsilon):
    """Of one group, (r - mean) / (std + epsilon)."""
    return [(r - mean_of(row)) / (math.sqrt(variance_of(row)) + epsilon) for r in row]


def jackknifed_row(row, epsilon):
    """G N - (G-1) mean_k N^(-k), N = 1/G sum A_i s_i, as G times the weights of the scores."""
    size = len(row)
    weights = [size * a / size for a in standardised(row, epsilon)]
    for k in range(size):
        kept = [i for i in range(size) if i != k]
        for i, a in zip(kept, standardised([row[i] for i in kept], epsilon), strict=True):
            weights[i] -= (size - 1) / size * a / (size - 1)
    return [size * w for w in weights]


def kept_row(row, kept, epsilon):
    """PODS by trying every part: the largest variance; then the smallest sum, the first places."""
    size = len(row)
    best = max(
        itertools.combinations(range(size), kept),
        key=lambda part: (
            round(variance_of([row[i] for i in part], ddof=0), 10),
            -round(sum(row[i] for i in part), 10),
            [-i for i in part],
        ),
    )
    inside = standardised([row[i] for i in best], epsilon)
    found = dict(zip(best, inside, strict=True))
    return [size / kept * found.get(i, 0.0) for i in range(size)]


def ebpo_rows(rewards, history, epsilon):
    """EBPO's algorithm 1 with all rewards and all groups' means of the past written out.

    `history` is (past rewards, past means), as lists.
    """
    past, means = history
    past = past + [r for row in rewards for r in row]
    means = means + [mean_of(row) for row in rewards]
    noise, tau_sq = variance_of(past, ddof=0) / len(rewards[0]), variance_of(means, ddof=0)
    shrink = noise / (noise + tau_sq)
    raw = [
        [r - ((1 - shrink) * mean_of(row) + shrink * mean_of(past)) for r in row] for row in rewards
    ]
    flat = [x for row in raw for x in row]
    spread = math.sqrt(variance_of(flat)) + epsilon
    return [[(x - mean_of(flat)) / spread for x in row] for row in raw]


def gdpo_rows(rewards, weights, epsilon):
    """Each function standardised in its group, the weighted sum over all, standardised again."""
    result = []
    for group in rewards:
        each = [standardised([row[f] for row in group], epsilon) for f in range(len(weights))]
        result.append([
            sum(weight * column[i] for weight, column in zip(weights, each, strict=True))
            for i in range(len(group))
        ])  # fmt: skip
    flat = [x for row in result for x in row]
    spread = math.sqrt(variance_of(flat)) + epsilon
    return [[(x - mean_of(flat)) / spread for x in row] for row in result]


def zoo_advantages(name, rewards, lengths, context, options):
    """Advantages of a batch under any baseline, written out; context is a plain dictionary.

    Of two reward functions, 0.1 length and what is left of the reward, their sum is the reward.
    """
    result = []
    if name == "gdpo":
        pairs = [
            [(r - 0.1 * length, 0.1 * length) for r, length in zip(*rows, strict=True)]
            for rows in zip(rewards, lengths, strict=True)
        ]
        return gdpo_rows(pairs, [1.0, 1.0], options["epsilon"])
    if name == "length_weighted":
        weights = [[n ** -options["power"] for n in row] for row in lengths]
        whole = mean_of([w for row in weights for w in row])
        rows = [standardised(row, options["epsilon"]) for row in rewards]
        return [
            [a * w / whole for a, w in zip(*pair, strict=True)]
            for pair in zip(rows, weights, strict=True)
        ]
    if name == "reinforce_pp":
        whole = mean_of([r for row in rewards for r in row])
        shifted = [[r - whole for r in row] for row in rewards]
        return token_whitened(shifted, lengths, options["epsilon"])
    if name == "reinforce_pp_baseline":
        shifted = [[r - mean_of(row) for r in row] for row in rewards]
        return token_whitened(shifted, lengths, options["epsilon"])
    if name == "ebpo":
        return ebpo_rows(rewards, context["past"], options["epsilon"])
    if name == "beta":
        low, width = options["minimum"], options["maximum"] - options["minimum"]
        rewards = [[(r - low) / width for r in row] for row in rewards]
        weights = beta_weights([mean_of(row) for row in rewards], options["ceiling"])
    for p, row in enumerate(rewards):
        centre = mean_of(row)
        if name == "james_stein":
            result.append(james_stein_row(rewards, p, options["epsilon"]))
            continue
        if name == "group_std_jackknife":
            result.append(jackknifed_row(row, options["epsilon"]))
            continue
        if name == "pods":
            kept = min(len(row), max(2, round(options["share"] * len(row))))
            result.append(kept_row(row, kept, options["epsilon"]))
            continue
        group = []
        for i, r in enumerate(row):
            others = [j for j in range(len(row)) if j != i]
            if name == "none":
                a = r
            elif name == "constant":
                a = r - options["value"]
            elif name == "running_mean":
                a = r - context["running"]
            elif name in ("oracle", "optimal", "remax", "critic"):
                key = {"oracle": "value_P", "optimal": "optimal_P", "remax": "greedy_P"}
                a = r - context[key.get(name, "critic_P")][p]
            elif name == "leave_one_out":
                a = r - mean_of([row[j] for j in others])
            elif name == "group_mean":
                a = r - centre
            elif name == "group_std":
                a = (r - centre) / (math.sqrt(variance_of(row)) + options["epsilon"])
            elif name == "leave_one_out_std":
                rest = [row[j] for j in others]
                a = (r - mean_of(rest)) / (math.sqrt(variance_of(rest)) + options["epsilon"])
            elif name == "quantile":
                level = options["level"]
                reached = [x for x in row if sum(y <= x for y in row) / len(row) >= level - 1e-12]
                a = (r - min(reached)) / (math.sqrt(variance_of(row)) + options["epsilon"])
            elif name == "maxrl":
                a = (r - centre) / (centre + options["epsilon"])
            elif name == "batch_std":
                flat = [x for each in rewards for x in each]
                a = (r - centre) / (math.sqrt(variance_of(flat)) + options["epsilon"])
            elif name == "beta":
                a = weights[p] * (r - centre)
            elif name == "opo":
                total = sum(lengths[p][j] for j in others)
                a = r - sum(lengths[p][j] * row[j] for j in others) / total
            group.append(a)
        result.append(group)
    return result


def joint_mean(prompts, group_size, baseline):
    """Exact mean of `1/(P G) sum A_i s_i` over all joint outcomes of all prompts' groups.

    Args:
        prompts: (logits, rewards, lengths) of each outcome; logits differ from the shared
            parameters by constants, so scores with respect to either are the same.
        group_size: G.
        baseline: (rewards [P][G], lengths [P][G]) to advantages [P, G]; sees all prompts at once.
    """
    tables = []
    for logits, rewards, lengths in prompts:
        p, scores = softmax_policy(logits)
        tables.append(
            [
                (
                    math.prod(p[a] for a in actions),
                    [rewards[a] for a in actions],
                    [lengths[a] for a in actions],
                    np.array([scores[a] for a in actions]),
                )
                for actions in itertools.product(range(len(p)), repeat=group_size)
            ]
        )
    mean = np.zeros(len(prompts[0][0]))
    for joint in itertools.product(*tables):
        weights = baseline([row[1] for row in joint], [row[2] for row in joint])
        estimate = sum(np.asarray(w) @ row[3] for w, row in zip(weights, joint, strict=True))
        mean += math.prod(row[0] for row in joint) * estimate / (len(prompts) * group_size)
    return mean


def enumerate_prompt(logits, rewards, name, group_size):
    """All group outcomes of one prompt: list of (probability, gradient estimate)."""
    p, scores = softmax_policy(logits)
    value = sum(a * z for a, z in zip(p, rewards, strict=True))
    outcomes = []
    for actions in itertools.product(range(len(p)), repeat=group_size):
        probability = math.prod(p[a] for a in actions)
        advantages = plain_advantages(name, [rewards[a] for a in actions], value)
        estimate = np.zeros(len(p))
        for a, advantage in zip(actions, advantages, strict=True):
            estimate += advantage * np.array(scores[a]) / group_size
        outcomes.append((probability, estimate))
    return outcomes


def true_gradient(logits, rewards):
    """Gradient of the expected reward of one prompt, by the product baseline."""
    p, _ = softmax_policy(logits)
    value = sum(a * z for a, z in zip(p, rewards, strict=True))
    return np.array([p[k] * (rewards[k] - value) for k in range(len(p))])


def bias_and_mse(prompts, name, group_size):
    """Bias vector and MSE when every prompt (logits, rewards) is used once; theta is shared.

    Every joint outcome of all prompts' groups is visited.
    """
    target = sum(true_gradient(*prompt) for prompt in prompts) / len(prompts)
    mean, mse = np.zeros_like(target), 0.0
    tables = [enumerate_prompt(*prompt, name, group_size) for prompt in prompts]
    for joint in itertools.product(*tables):
        probability = math.prod(p for p, _ in joint)
        estimate = sum(e for _, e in joint) / len(prompts)
        mean += probability * estimate
        mse += probability * float(((estimate - target) ** 2).sum())
    return mean - target, mse


def minibatch_mse(prompts, name, group_size, num_prompts):
    """MSE of B prompts drawn independently and uniformly, by enumeration of everything."""
    target = sum(true_gradient(*prompt) for prompt in prompts) / len(prompts)
    pooled = [
        (p / len(prompts), e)
        for prompt in prompts
        for p, e in enumerate_prompt(*prompt, name, group_size)
    ]
    mse = 0.0
    for joint in itertools.product(pooled, repeat=num_prompts):
        estimate = sum(e for _, e in joint) / num_prompts
        mse += math.prod(p for p, _ in joint) * float(((estimate - target) ** 2).sum())
    return mse


def one_score(model, prompt_tokens, completion_tokens, temperature=1.0):
    """Score of one completion by plain autograd, unpadded: trainable names to gradients."""
    ids = torch.tensor([list(prompt_tokens) + list(completion_tokens)])
    logits = model(input_ids=ids, use_cache=False).logits[0] / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    first = len(prompt_tokens)
    total = sum(logprobs[t - 1, ids[0, t]] for t in range(first, ids.shape[1]))
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(total, list(trainable.values()), materialize_grads=True)
    return dict(zip(trainable, gradients, strict=True))


def one_flat_score(model, prompt_tokens, completion_tokens, temperature=1.0):
    """The same as one vector, names sorted."""
    score = one_score(model, prompt_tokens, completion_tokens, temperature)
    return torch.cat([score[name].flatten() for name in sorted(score)])
