"""Slow, obviously right versions. They share no code with the package's fast paths."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch


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
    """Gradient of the expected reward of one prompt, by the product rule."""
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
