"""Rollouts of several turns in one record: traces and results of verifiers.

A trace of verifiers, which prime-rl also logs, is a tree of messages (nodes). The tree branches if
the policy read something else than the conversation so far, such as a summary, or if it asked
another agent. Each path from the root to a leaf becomes one row. A message that is in several paths
must be counted once: it counts as written by the policy only in the first path that contains it,
which agrees with prime-rl's `iter_trainable_branches`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_ustat.logs.turns import differ_by_turn

# Fields of a Rollout; see `formats.Fields`.
Fields = dict[str, Any]


def trace_fields(
    trace: Mapping[str, Any], episode: Mapping[str, Any], untrained: str, at: str
) -> Fields:
    """Parse the trace of a single agent.

    The prompt of a row ends before the first token that the policy wrote.

    Args:
        trace: trace from the log.
        episode: episode that contains the trace.
        untrained: reason why the framework did not train on the episode; empty if it did.
        at: position of the trace in the line, for messages.
    """
    nodes = trace["nodes"]
    written: set[int] = set()
    turns = [_path_fields(nodes, path, written) for path in _paths(nodes)]
    turns = [turn for turn in turns if any(turn["loss_mask"])] or turns[:1]
    policy = ((episode.get("run") or {}).get("work") or {}).get("policy") or {}
    first, last = policy.get("start"), policy.get("end")
    fault = f"written by policies {first} to {last}" if first != last else ""
    advantages = [node.get("advantages") for node in nodes if node.get("sampled")]
    fault = fault or credit_by_turn("advantage", advantages)
    agent = trace.get("agent") or {}
    if not untrained and trace.get("ok", episode.get("ok")) is False:
        untrained = "it failed (ok is false)"
    elif not untrained and agent.get("trainable") is False:
        untrained = "it is from an agent that is not trained"
    rewards = {name: (reward or {}).get("score") for name, reward in trace["rewards"].items()}
    weights = {name: (reward or {}).get("weight") for name, reward in trace["rewards"].items()}
    reasons = [call.get("finish_reason") for call in trace.get("calls") or ()]
    group = (episode.get("group") or {}).get("id")
    if isinstance(group, list | dict):
        raise TypeError("group.id is not a name")
    group = json.dumps(turns[0]["prompt_ids"]) if group is None else group
    ended = None if not reasons else reasons[-1] != "length"
    if not all(turn["logprobs"] is not None for turn in turns):
        turns = [turn | {"logprobs": None} for turn in turns]
    return dict(
        turns[0], at=at, group=f"{group}/{agent['name']}" if "name" in agent else str(group),
        untrained=untrained, ended=ended, later=[turn | {"ended": ended} for turn in turns[1:]],
        policy_version=None if last is None else str(last), fault=fault,
        rewards=(rewards, {name: 1.0 if x is None else x for name, x in weights.items()}),
    )  # fmt: skip


def _paths(nodes: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the indices of the nodes on each path from a root to a leaf, ordered by leaf.

    `parent` is the index of a node's parent, or None for a root. If a node has no such key, its
    parent is the node before it.
    """
    parents = [node.get("parent", place - 1 if place else None) for place, node in enumerate(nodes)]
    if any(parent is not None and not 0 <= parent < place for place, parent in enumerate(parents)):
        raise ValueError("a node has no earlier node as its parent")
    paths = []
    for leaf in (place for place in range(len(nodes)) if place not in parents):
        path, place = [], leaf
        while place is not None:
            path.append(place)
            place = parents[place]
        paths.append(path[::-1])
    return paths or [[]]


def _path_fields(
    nodes: Sequence[Mapping[str, Any]], path: Sequence[int], written: set[int]
) -> Fields:
    """Concatenate the tokens of a path, and add the nodes that the policy wrote to `written`.

    Nodes that are already in `written` get the loss mask 0, because an earlier path counts them. A
    node has log-probabilities either for all its tokens or only for its sampled tokens.
    """
    tokens, mask, logprobs, are_logged = list[int](), list[int](), list[float](), True
    for place in path:
        node = nodes[place]
        ids = node.get("token_ids") or []
        sampled = bool(node.get("sampled")) and place not in written
        node_mask = [int(sampled and bool(x)) for x in node.get("mask") or [sampled] * len(ids)]
        values = iter(node.get("logprobs") or ())
        if place in written:
            logprobs += [0.0] * len(node_mask)
        elif node.get("logprobs") and len(node["logprobs"]) == len(node_mask) != sum(node_mask):
            # This node has log-probabilities for all its tokens.
            logprobs += [float(x) for x in values]
        else:
            logprobs += [float(next(values, math.nan)) if is_kept else 0.0 for is_kept in node_mask]
        are_logged &= not any(node_mask) or bool(node.get("logprobs"))
        if sampled:
            written.add(place)
        tokens += ids
        mask += node_mask
    start = mask.index(1) if 1 in mask else len(tokens)
    return dict(
        prompt_ids=tokens[:start], completion_ids=tokens[start:], loss_mask=mask[start:],
        logprobs=logprobs[start:] if are_logged else None,
    )  # fmt: skip


def result_fields(row: Mapping[str, Any]) -> Fields:
    """Parse a line of `results.jsonl`, which verifiers' `vf-eval` writes: one rollout.

    With `--state-columns trajectory` the line contains the steps of the rollout. If the client
    returned all steps with tokens, each step becomes a turn. Otherwise only the texts are read.
    """
    common: Fields = dict(
        group=str(row["example_id"]), ended=not row["is_truncated"],
        untrained="it failed: it has an error" if row.get("error") else "",
        rewards=({"reward": row["reward"]}, {"reward": 1.0}),
    )  # fmt: skip
    steps = row.get("trajectory") or []
    if not steps or not all(step.get("tokens") for step in steps):
        return common | {"prompt": row["prompt"], "completion": row["completion"]}
    turns: list[Fields] = [
        dict(
            prompt_ids=tokens["prompt_ids"], completion_ids=tokens["completion_ids"],
            loss_mask=tokens["completion_mask"], logprobs=tokens["completion_logprobs"] or None,
        )
        for tokens in (step["tokens"] for step in steps)
    ]  # fmt: skip
    faults = [
        credit_by_turn(name, [step.get(name) for step in steps]) for name in ("advantage", "reward")
    ]
    return common | turns[0] | {"later": turns[1:], "fault": next(filter(None, faults), "")}


def credit_by_turn(name: str, values: Sequence[Any]) -> str:
    """Return the reason why a rollout is unusable if its turns have different values, or "".

    Args:
        name: meaning of the values, `advantage` or `reward`.
        values: value of each turn.
    """
    different = differ_by_turn(values)
    if different is None:
        return ""
    low, high = different
    return (
        f"its turns have {name} {low:g} and {high:g}, but all turns must have the same {name}, "
        f"because a separate {name} for each turn gives another gradient"
    )
