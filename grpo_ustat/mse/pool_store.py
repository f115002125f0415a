"""Stored pools, which studies can resume, extend and reuse: one file per question and part.

A pool folder contains `pool.json`, which records the settings of its completions, and one
safetensors file per question and part. A part consists of `count` completions of a question,
beginning with the completion number `first`. Its file has their rewards, and the inner products and
sketches of their scores (gradients of the log-probability). New completions are added as new parts.
Stored completions are never sampled or scored again.

As long as all rewards are equal, there is no gradient, so nothing is scored. Parts are then stored
unscored, in files with a different suffix. Once a scored part exists, unscored parts count as
missing.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from grpo_ustat.config.identity import (
    data_fingerprint,
    drop_neutral_keys,
    fingerprint,
    local_reward_funcs,
    reward_funcs_fingerprint,
    weights_fingerprint,
)
from grpo_ustat.config.model import adapter_base, model_folder
from grpo_ustat.config.mse import MseConfig
from grpo_ustat.config.parts import StudySampling
from grpo_ustat.config.reward_funcs import as_typed
from grpo_ustat.config.schema import ConfigError, flatten
from grpo_ustat.estimators.baselines import weighted_sum
from grpo_ustat.mse.pool_parts import Completions, Part, WeightedPart
from grpo_ustat.policy.configured import configured_task
from grpo_ustat.policy.tokenizer import configured_tokenizer
from grpo_ustat.records import Prompt
from grpo_ustat.runs.files import PROMPT_DATE, atomic_write, create_whole, kept_moment
from grpo_ustat.runs.folder import versions
from grpo_ustat.runs.log import attempt, write_rows
from grpo_ustat.tasks.base import extracted

# Maximum number of completions in completions.parquet.
MAX_SAMPLED_COMPLETIONS = 2000
# File suffixes of scored and unscored parts.
SCORED, UNSCORED = ".safetensors", ".unscored"
# File name of a part: question, index of the first completion, number of completions.
PART = re.compile(r"([0-9a-f]+)-(\d+)-(\d+)")
# Values as a user types them on the command line.
SPELT = {None: "null", True: "true", False: "false"}
# Packages on which completions and scores depend.
SCORING_PACKAGES = ("torch", "transformers")


Stored = TypeVar("Stored", bound=Completions)


def draws_of(config: MseConfig) -> dict[str, Any]:
    """Return the settings that determine a pool's completions and scores.

    Studies with equal settings share a pool.
    """
    keys = drop_neutral_keys(asdict(config))
    chosen = ("model", "dataset", "prompt", "seed", "temperature", "max_completion_length")
    budget = ("feature_sketch", "gradient_sketch")
    draws = {key: keys[key] for key in chosen} | {key: keys["budget"][key] for key in budget}
    for key in ("study_size", "train_size", "test_size"):
        draws["dataset"].pop(key, None)
    if adapter_base(model_folder(config.model.model_name_or_path)) is not None:
        draws["merge_adapters"] = config.study.merge_adapters
    # Reward weights are left out, because a pool does not store the weighted sum.
    return draws | {
        "rollout": config.rollout.name,
        "tf32": config.computes_tf32,
        "parameters": config.study.parameters,
        "reward_funcs": local_reward_funcs(config.reward_funcs),
        "own_reward_funcs": reward_funcs_fingerprint(config.reward_funcs),
        "weights": weights_fingerprint(config.model.model_name_or_path),
        "data": data_fingerprint(config.dataset),
    }


def prompt_date(
    pool: Path, output_root: Path | None = None, draws: Mapping[str, Any] | None = None
) -> datetime:
    """Return and store the time that chat templates write into the prompts of a pool.

    This is the time at which the pool was started. If the output root contains a pool with the same
    settings, that pool's time is used, because its completions will be reused.

    Args:
        draws: Settings of the pool; see `draws_of`.
    """
    kept = [pool / PROMPT_DATE]
    if output_root is not None:
        same = json.loads(json.dumps(draws))
        for note in _pools_below(output_root):
            with suppress(OSError, ValueError):
                if json.loads(note.read_text()) == same:
                    kept.append(note.parent / PROMPT_DATE)
    first = next((file for file in kept if file.is_file()), None)
    pool.mkdir(parents=True, exist_ok=True)
    return kept_moment(kept[0], kept_moment(first) if first else None)


def _pools_below(root: Path) -> list[Path]:
    """List the files pool.json in the run folders of all studies in an output root."""
    return sorted((root.resolve() / "mse").glob("*/*/pool/pool.json"))


class PoolStore:
    """Files in one pool folder.

    Args:
        folder: Pool folder; it may be missing.
        draws: Settings from `draws_of`; if empty, the settings of stored parts are not checked.
    """

    def __init__(self, folder: Path, draws: dict[str, Any]):
        self.folder, self.draws = folder, draws

    @cached_property
    def _mark(self) -> str:
        """Fingerprint of the settings; each part stores it."""
        return fingerprint(self.draws)

    def open(self) -> None:
        """Create the folder, or check that its pool has the same policy and settings."""
        note = self.folder / "pool.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not note.is_file():
                create_whole(note, json.dumps(self.draws, indent=1))
            text = note.read_text(errors="replace")
        except OSError as error:
            raise ConfigError(f"the pool folder {self.folder} cannot be used: {error}") from error
        try:
            stored = json.loads(text)
        except ValueError:
            stored = None
        if not isinstance(stored, dict):
            raise ConfigError(f"{note} is damaged: delete it; it will be recreated")
        for key in dict.fromkeys([*stored, *self.draws]):
            there, here = stored.get(key), self.draws.get(key)
            if there != here and self._marks() == {self._mark}:
                raise ConfigError(
                    f"{note} is damaged: it has {key}={there}, but all completions in this folder "
                    f"have {key}={here}; delete the file and it will be recreated"
                )
            if key == "tf32" and there != here:
                kinds = ["TF32 (a GPU)" if x else "full precision" for x in (there, here)]
                raise ConfigError(
                    f"{self.folder} has scores in {kinds[0]}, but this study computes in "
                    f"{kinds[1]}: use the previous launch.device and model.dtype, or another "
                    "pool=DIR"
                )
            if key in ("parameters", "merge_adapters") and there != here:
                there, here = (SPELT.get(x, x) for x in (there, here))
                raise ConfigError(
                    f"{self.folder} has scores for study.{key}={there}, but this study has {here}: "
                    f"use study.{key}={there} or another pool=DIR"
                )
            if key == "reward_funcs" and there != here:
                texts = [as_typed(x) if isinstance(x, list) else str(x) for x in (there, here)]
                raise ConfigError(
                    f"{self.folder} was judged with reward_funcs={texts[0]}, but this study has "
                    f"{texts[1]}: use reward_funcs={texts[0]} or another pool=DIR"
                )
            if isinstance(there, dict) and isinstance(here, dict):
                there, here = flatten(there), flatten(here)
                differ = (name for name in {**there, **here} if there.get(name) != here.get(name))
                name = next(differ, "")
                key, there, here = f"{key}.{name}", there.get(name), here.get(name)
            if there != here:
                raise ConfigError(
                    f"{self.folder} has completions for {key}={there}, but this study has {here}: "
                    "use another pool=DIR"
                )

    def _marks(self) -> set[str | None]:
        """Return the settings' fingerprints that the readable parts contain."""
        marks: set[str | None] = set()
        for path in [*self._files(SCORED), *self._files(UNSCORED)]:
            with suppress(OSError, SafetensorError), safe_open(path, framework="numpy") as file:
                marks.add((file.metadata() or {}).get("draws"))
        return marks

    def _files(self, kind: str) -> Iterator[Path]:
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                if PART.fullmatch(entry.name.removesuffix(kind)):
                    yield self.folder / entry.name

    @property
    def kind(self) -> str:
        """Kind of the parts in use: scored if any scored part exists, otherwise unscored."""
        return SCORED if any(self._files(SCORED)) else UNSCORED

    def unscored_rewards(self) -> set[tuple[float, ...]]:
        """Return the distinct rewards in unscored parts, as tuples with one entry per function.

        Damaged parts are skipped here and reported by `read`.
        """
        seen: set[tuple[float, ...]] = set()
        for path in self._files(UNSCORED):
            with suppress(OSError, SafetensorError, TypeError):
                seen |= distinct_rewards(_load(path, Completions)[0].rewards_NF)
        return seen

    def delete_unscored(self) -> None:
        """Delete the unscored parts; scored parts will replace them."""
        for path in self._files(UNSCORED):
            path.unlink(missing_ok=True)

    def parts(self, prompts: Sequence[Prompt], kind: str = SCORED) -> list[list[tuple[int, int]]]:
        """List the stored parts of each question as pairs (first, count).

        Only parts that follow each other without a gap, beginning with completion 0, are listed.
        The folder is scanned only once, because it may contain tens of thousands of files.
        """
        spans: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for path in self._files(kind):
            stem, first, count = path.stem.split("-")
            spans[stem].append((int(first), int(count)))
        return [_gapless(sorted(spans[_stem(prompt)])) for prompt in prompts]

    def stored_completions(
        self, prompts: Sequence[Prompt], size: int, kind: str = SCORED
    ) -> list[int]:
        """Return, for each question, the number of stored completions among the first `size`."""
        stored_P: list[int] = []
        for spans in self.parts(prompts, kind):
            stored = max((first + count for first, count in spans if first < size), default=0)
            if stored > size:
                raise ConfigError(
                    f"{self.folder} has {stored} completions per question in parts that cannot be "
                    f"split, but this study has budget.pool_completions={size}: use {stored} or "
                    "another pool=DIR"
                )
            stored_P.append(stored)
        return stored_P

    def divides_at(self, prompts: Sequence[Prompt], size: int) -> bool:
        """Return True if no stored part must be split to read each question's first completions.

        Args:
            size: Number of completions to read.
        """
        return not any(
            first < size < first + count
            for spans in self.parts(prompts, self.kind)
            for first, count in spans
        )

    def has_part(self, prompt: Prompt, first: int, count: int) -> bool:
        """Return True if a scored part with exactly these completions is stored."""
        return self._path(prompt, first, count).exists()

    def usable_parts(self, prompts: list[Prompt], size: int) -> list[tuple[Path, int]]:
        """List the parts that lie within a question's first `size` completions: (file, count)."""
        kind = self.kind
        return [
            (self._path(prompt, first, count, kind), count)
            for prompt, spans in zip(prompts, self.parts(prompts, kind), strict=True)
            for first, count in spans
            if first + count <= size
        ]

    def write(self, prompt: Prompt, first: int, part: Completions) -> None:
        """Write a scored or unscored part atomically."""
        kind = SCORED if isinstance(part, Part | WeightedPart) else UNSCORED
        path = self._path(prompt, first, len(part.rewards_N), kind)
        arrays = {key: value for key, value in vars(part).items() if value is not None}
        packages = arrays.pop("packages", None) or scored_with()
        arrays = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
        facts = {"prompt": prompt.id, "packages": packages}
        facts["draws"] = self._mark
        with atomic_write(path, shared=True) as staged:
            save_file(arrays, staged, facts)

    def read(self, prompt: Prompt, first: int, count: int) -> Part:
        """Read one scored part."""
        return self._read(self._path(prompt, first, count), count, Part)

    def weighted_part(self, prompt: Prompt, count: int) -> WeightedPart:
        """Read the part of a question with token weights."""
        return self._read(self._path(prompt, 0, count), count, WeightedPart)

    def completions(
        self, prompts: Sequence[Prompt], size: float = math.inf
    ) -> Iterator[list[Completions]]:
        """Yield, for each question, the list of its stored parts in order.

        Only parts with `first` below `size` are read. All parts are scored, or all are unscored.
        """
        kind = self.kind
        record = Part if kind == SCORED else Completions
        for prompt, spans in zip(prompts, self.parts(prompts, kind), strict=True):
            yield [
                self._read(self._path(prompt, first, count, kind), count, record)
                for first, count in spans
                if first < size
            ]

    def _read(self, path: Path, count: int, record: type[Stored]) -> Stored:
        try:
            part, facts = _load(path, record)
        except (OSError, SafetensorError, TypeError) as error:
            raise ConfigError(f"{path} is damaged: delete it; it will be recreated") from error
        if len(part.rewards_N) != count:
            raise ConfigError(f"{path} is damaged: delete it; it will be recreated")
        there = facts.get("draws")
        if self.draws and there != self._mark:
            raise ConfigError(
                f"{path} has completions for the settings {there}, but this study has "
                f"{self._mark}: use another pool=DIR"
            )
        return part

    def _path(self, prompt: Prompt, first: int, count: int, kind: str = SCORED) -> Path:
        return self.folder / f"{_stem(prompt)}-{first}-{count}{kind}"


def mean_sampler_gap(gaps: Sequence[np.ndarray | None]) -> float | None:
    """Return the mean gap over all parts, weighted by tokens; None if the model was the sampler."""
    if gaps[0] is None:
        return None
    gap_K, tokens_K = np.array(gaps).T
    return float(np.average(gap_K, weights=tokens_K))


def distinct_rewards(rewards_NF: np.ndarray) -> set[tuple[float, ...]]:
    """Return the distinct rewards, as tuples with one entry per reward function.

    >>> distinct_rewards(np.array([[0.0, 1.0], [0.0, 1.0]]))
    {(0.0, 1.0)}
    """
    return set(map(tuple, rewards_NF.tolist()))


def _load(path: Path, record: type[Stored]) -> tuple[Stored, dict[str, str]]:
    """Return the part in a file, and the file's metadata."""
    with safe_open(path, framework="numpy") as file:
        facts = file.metadata() or {}
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return record(**arrays, packages=facts.get("packages")), facts


def reuse_pool(
    output_root: Path, draws: dict[str, Any], folder: Path, prompts: list[Prompt], size: int
) -> str:
    """Reuse completions of the same policy from another study in the same output root.

    The pool with the most usable completions is chosen. Its files are hard-linked, or copied if the
    file system has no hard links, so each run folder stays complete if the other one is deleted.

    Args:
        draws: Settings of this study; see `draws_of`.
        folder: Pool folder of this study, below its run folder.
        size: Number of completions per prompt, N.

    Returns:
        A line on the reused completions; "" if no completions are reused.
    """
    root = output_root.resolve()
    if root not in folder.resolve().parents:
        # The run folder is outside the output root.
        return ""
    store = PoolStore(folder, draws)
    draws = json.loads(json.dumps(draws))
    best, most = folder, sum(count for _, count in store.usable_parts(prompts, size))
    for note in _pools_below(root):
        with suppress(OSError, ValueError):
            if note.parent.resolve() != folder.resolve() and json.loads(note.read_text()) == draws:
                parts = PoolStore(note.parent, draws).usable_parts(prompts, size)
                total = sum(count for _, count in parts)
                best, most = (note.parent, total) if total > most else (best, most)
    if best == folder:
        return ""
    store.open()
    for path, _ in PoolStore(best, draws).usable_parts(prompts, size):
        target = folder / path.name
        if target.exists():
            continue
        try:
            os.link(path, target)
        except OSError:
            # The file is on another file system, or links are not supported.
            with atomic_write(target, shared=True) as staged:
                shutil.copyfile(path, staged)
    return f"{most:,} completions of {best} are reused".replace(",", " ")


@cache
def scored_with() -> str:
    """Return the installed versions of the packages that compute scores."""
    installed = versions()
    return ", ".join(f"{name} {installed[name]}" for name in SCORING_PACKAGES)


def _gapless(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the spans (first, count) that follow each other without gaps, beginning at 0.

    >>> _gapless([(0, 4), (0, 8), (4, 2), (8, 8)])
    [(0, 4), (4, 2)]
    """
    kept, end = [], 0
    for first, count in spans:
        if first == end:
            kept.append((first, count))
            end += count
    return kept


def _stem(prompt: Prompt) -> str:
    text = f"{prompt.id}\x1f{prompt.text}\x1f{prompt.answer}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def leave_sample(
    sampling: StudySampling, prompts: list[Prompt], pool: Path, folder: Path, is_imported: bool
) -> None:
    """Write completions.parquet with each question's first completions.

    If there are more than MAX_SAMPLED_COMPLETIONS questions, only evenly spaced questions are
    written. If the file cannot be written, the study continues without it. Answers are not
    extracted from imported completions.
    """
    prompts = prompts[:: -(-len(prompts) // MAX_SAMPLED_COMPLETIONS)]
    count, store = MAX_SAMPLED_COMPLETIONS // len(prompts), PoolStore(pool, {})
    model = sampling.policy.model
    tokenizer, task = configured_tokenizer(model), None
    if not is_imported:
        task = configured_task(sampling.task, model, tokenizer)
    rows: list[dict[str, Any]] = []
    for prompt, (part, *_) in zip(prompts, store.completions(prompts), strict=True):
        rewards_N = weighted_sum(part.rewards_NF, np.array(sampling.task.reward_weights))
        pairs = zip(part.tokens_NT[:count], part.lengths_N, strict=False)
        texts = tokenizer.batch_decode([row[:n] for row, n in pairs], skip_special_tokens=True)
        rows += [
            {
                "prompt": prompt.text,
                "completion": text,
                "reward": float(rewards_N[i]),
                "prompt_id": prompt.id,
                "completion_index": i,
                "length": int(part.lengths_N[i]),
                "ended": bool(part.ended_N[i]),
                "answer": prompt.answer if task else None,
                "extracted": extracted(task, prompt, text) if task else None,
            }
            for i, text in enumerate(texts)
        ]
    attempt(f"completions.parquet of {folder}", lambda: write_rows(folder, rows))
