"""Kept pools: one file per question and part, so that a study resumes, extends and is reused.

A pool folder holds `pool.json`, which says what its completions are draws of, and for every
question one safetensors file per part: completions `first ... first + count` of that question with
rewards, squared norms and inner products among the part's completions, and sketches. Adding
completions adds parts; no stored completion is sampled or scored again.

As long as all rewards are one and the same there is no gradient, and nothing to score: parts are
unscored, in files of another name. Once a part is scored, unscored ones count as missing.
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
from grpo_ustat.runs.contents import parsed_json
from grpo_ustat.runs.files import PROMPT_DATE, atomic_write, create_whole, kept_moment
from grpo_ustat.runs.folder import versions
from grpo_ustat.runs.log import attempt, write_rows
from grpo_ustat.tasks.base import extracted

# Completions of a study's completions.parquet.
MAX_SAMPLED_COMPLETIONS = 2000
# Kinds of parts, by the ends of their names.
SCORED, UNSCORED = ".safetensors", ".unscored"
# Question, first and number of its completions.
PART = re.compile(r"([0-9a-f]+)-(\d+)-(\d+)")
# Spelling of values on a command line.
SPELT = {None: "null", True: "true", False: "false"}
# Packages that a completion and its score depend on.
SCORING_PACKAGES = ("torch", "transformers")


Stored = TypeVar("Stored", bound=Completions)


def draws_of(config: MseConfig) -> dict[str, Any]:
    """Return the settings that decide a pool's completions and scores.

    Studies that agree in them share a pool.
    """
    keys = drop_neutral_keys(asdict(config))
    chosen = ("model", "dataset", "prompt", "seed", "temperature", "max_completion_length")
    budget = ("feature_sketch", "gradient_sketch")
    draws = {key: keys[key] for key in chosen} | {key: keys["budget"][key] for key in budget}
    for key in ("study_size", "train_size", "test_size"):
        draws["dataset"].pop(key, None)
    if adapter_base(model_folder(config.model.model_name_or_path)) is not None:
        draws["merge_adapters"] = config.study.merge_adapters
    # Weights of reward functions are left out: they belong to the sum, which no pool holds.
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
    """Return the moment whose date a chat template writes into a pool's prompts, and keep it there.

    It is when the pool was begun, or a pool of the same draws below the output root, whose
    completions are then reused.
    """
    kept = [pool / PROMPT_DATE]
    if output_root is not None:
        same = json.loads(json.dumps(draws))
        for note in _pools_below(output_root):
            with suppress(OSError, ValueError):
                if parsed_json(note.read_text()) == same:
                    kept.append(note.parent / PROMPT_DATE)
    first = next((file for file in kept if file.is_file()), None)
    pool.mkdir(parents=True, exist_ok=True)
    return kept_moment(kept[0], kept_moment(first) if first else None)


def _pools_below(root: Path) -> list[Path]:
    """List the notes of the pools that studies of this output root have in their run folders."""
    return sorted((root.resolve() / "mse").glob("*/*/pool/pool.json"))


class PoolStore:
    """The files of one pool folder.

    Args:
        folder: need not exist.
        draws: see `draws_of`; empty where any are read.
    """

    def __init__(self, folder: Path, draws: dict[str, Any]):
        self.folder, self.draws = folder, draws

    @cached_property
    def _mark(self) -> str:
        """Fingerprint of these settings, which parts record."""
        return fingerprint(self.draws)

    def open(self) -> None:
        """Create the folder, or check that it holds draws of the same policy and settings."""
        note = self.folder / "pool.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not note.is_file():
                create_whole(note, json.dumps(self.draws, indent=1))
            text = note.read_text(errors="replace")
        except OSError as error:
            raise ConfigError(f"the pool folder {self.folder} cannot be used: {error}") from error
        try:
            stored = parsed_json(text)
        except ValueError:
            stored = None
        if not isinstance(stored, dict):
            raise ConfigError(f"{note} is damaged: delete it, it will be made again")
        for key in dict.fromkeys([*stored, *self.draws]):
            there, here = stored.get(key), self.draws.get(key)
            if there != here and self._marks() == {self._mark}:
                raise ConfigError(
                    f"{note} is damaged: delete it, it will be made again; it says {key}={there}, "
                    f"and all completions here are of {key}={here}"
                )
            if key == "tf32" and there != here:
                kinds = ["TF32 (a GPU)" if x else "full precision" for x in (there, here)]
                raise ConfigError(
                    f"{self.folder} holds scores in {kinds[0]}, this study computes in "
                    f"{kinds[1]}: use the launch.device and model.dtype of before, "
                    "or another pool=DIR"
                )
            if key in ("parameters", "merge_adapters") and there != here:
                there, here = (SPELT.get(x, x) for x in (there, here))
                raise ConfigError(
                    f"{self.folder} holds scores of study.{key}={there}, asked is {here}: use "
                    f"study.{key}={there} or another pool=DIR"
                )
            if key == "reward_funcs" and there != here:
                texts = [as_typed(x) if isinstance(x, list) else str(x) for x in (there, here)]
                raise ConfigError(
                    f"{self.folder} was judged with reward_funcs={texts[0]}, asked is {texts[1]}: "
                    f"use reward_funcs={texts[0]} or another pool=DIR"
                )
            if isinstance(there, dict) and isinstance(here, dict):
                there, here = flatten(there), flatten(here)
                differ = (name for name in {**there, **here} if there.get(name) != here.get(name))
                name = next(differ, "")
                key, there, here = f"{key}.{name}", there.get(name), here.get(name)
            if there != here:
                raise ConfigError(
                    f"{self.folder} holds completions of {key}={there}, asked is {here}: use "
                    "another pool=DIR"
                )

    def _marks(self) -> set[str | None]:
        """Collect the fingerprints of the settings that the readable parts record."""
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
        """Kind of parts in use: scored ones as soon as one exists."""
        return SCORED if any(self._files(SCORED)) else UNSCORED

    def unscored_rewards(self) -> set[tuple[float, ...]]:
        """Collect the rewards that occur in unscored parts, each by every reward function.

        A damaged part has none; `read` names it.
        """
        seen: set[tuple[float, ...]] = set()
        for path in self._files(UNSCORED):
            with suppress(OSError, SafetensorError, TypeError):
                seen |= distinct_rewards(_load(path, Completions)[0].rewards_NF)
        return seen

    def delete_unscored(self) -> None:
        """Delete the unscored parts: they are made again as scored ones."""
        for path in self._files(UNSCORED):
            path.unlink(missing_ok=True)

    def parts(self, prompts: Sequence[Prompt], kind: str = SCORED) -> list[list[tuple[int, int]]]:
        """List (first, count) of each stored part of every question, in order, without gaps from 0.

        All are from one look at the folder, which may hold tens of thousands of files.
        """
        spans: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        for path in self._files(kind):
            stem, first, count = path.stem.split("-")
            spans[stem].append((int(first), int(count)))
        return [_gapless(sorted(spans[_stem(prompt)])) for prompt in prompts]

    def stored_completions(
        self, prompts: Sequence[Prompt], size: int, kind: str = SCORED
    ) -> list[int]:
        """Count each question's stored completions among the first `size`."""
        stored_P: list[int] = []
        for spans in self.parts(prompts, kind):
            stored = max((first + count for first, count in spans if first < size), default=0)
            if stored > size:
                raise ConfigError(
                    f"{self.folder} holds {stored} completions a question in parts that cannot be "
                    f"split, asked is budget.pool_completions={size}: use {stored} or another "
                    "pool=DIR"
                )
            stored_P.append(stored)
        return stored_P

    def has_part(self, prompt: Prompt, first: int, count: int) -> bool:
        """Return True if this very part is stored, scored."""
        return self._path(prompt, first, count).exists()

    def usable_parts(self, prompts: list[Prompt], size: int) -> list[tuple[Path, int]]:
        """List the files, and completions in each, of the questions' first `size` completions."""
        kind = self.kind
        return [
            (self._path(prompt, first, count, kind), count)
            for prompt, spans in zip(prompts, self.parts(prompts, kind), strict=True)
            for first, count in spans
            if first + count <= size
        ]

    def write(self, prompt: Prompt, first: int, part: Completions) -> None:
        """Write one part, scored or not, whole or not at all."""
        kind = SCORED if isinstance(part, Part | WeightedPart) else UNSCORED
        path = self._path(prompt, first, len(part.rewards_N), kind)
        arrays = {key: value for key, value in vars(part).items() if value is not None}
        packages = arrays.pop("packages", None) or scored_with()
        arrays = {key: np.ascontiguousarray(value) for key, value in arrays.items()}
        facts = {"prompt": prompt.id, "digest": _digest(arrays), "packages": packages}
        facts["draws"] = self._mark
        with atomic_write(path, shared=True) as staged:
            save_file(arrays, staged, facts)

    def read(self, prompt: Prompt, first: int, count: int) -> Part:
        """Read one scored part."""
        return self._read(self._path(prompt, first, count), count, Part)

    def weighted_part(self, prompt: Prompt, count: int) -> WeightedPart:
        """Read the part of a question whose tokens are weighted; see `read` for what is raised."""
        return self._read(self._path(prompt, 0, count), count, WeightedPart)

    def completions(
        self, prompts: Sequence[Prompt], size: float = math.inf
    ) -> Iterator[list[Completions]]:
        """Yield the stored parts of one question after the other, in order.

        They are those that begin below `size`: scored, or all unscored.
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
            part, facts, digest = _load(path, record)
        except (OSError, SafetensorError, TypeError) as error:
            raise ConfigError(f"{path} is damaged: delete it, it will be made again") from error
        if facts.get("digest") != digest or len(part.rewards_N) != count:
            raise ConfigError(f"{path} is damaged: delete it, it will be made again")
        there = facts.get("draws")
        if self.draws and there != self._mark:
            raise ConfigError(
                f"{path} holds completions of settings {there}, asked are {self._mark}: use "
                "another pool=DIR"
            )
        return part

    def _path(self, prompt: Prompt, first: int, count: int, kind: str = SCORED) -> Path:
        return self.folder / f"{_stem(prompt)}-{first}-{count}{kind}"


def mean_sampler_gap(gaps: Sequence[np.ndarray | None]) -> float | None:
    """Average the gaps of all parts over their tokens; None where the model itself sampled."""
    if gaps[0] is None:
        return None
    gap_K, tokens_K = np.array(gaps).T
    return float(np.average(gap_K, weights=tokens_K))


def distinct_rewards(rewards_NF: np.ndarray) -> set[tuple[float, ...]]:
    """Return the rewards that occur, each by every reward function.

    >>> distinct_rewards(np.array([[0.0, 1.0], [0.0, 1.0]]))
    {(0.0, 1.0)}
    """
    return set(map(tuple, rewards_NF.tolist()))


def _load(path: Path, record: type[Stored]) -> tuple[Stored, dict[str, str], str]:
    """Read a file's part, the facts beside it, and the digest of its arrays."""
    with safe_open(path, framework="numpy") as file:
        facts = file.metadata() or {}
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return record(**arrays, packages=facts.get("packages")), facts, _digest(arrays)


def reuse_pool(
    output_root: Path, draws: dict[str, Any], folder: Path, prompts: list[Prompt], size: int
) -> str:
    """Take over the completions that a study of the same output root has drawn of the same policy.

    Of all such pools the one with the most of what is asked for is taken. Its files are linked
    where the file system can, so that each run folder stays whole when the other is deleted.

    Args:
        draws: of this study, see `draws_of`.
        folder: of this study's own pool, below its run folder.
        size: N, the completions of each prompt that are asked for.

    Returns:
        A line on what was taken over; "" where there is nothing.
    """
    root = output_root.resolve()
    if root not in folder.resolve().parents:
        # The run folder was placed elsewhere.
        return ""
    store = PoolStore(folder, draws)
    draws = json.loads(json.dumps(draws))
    best, most = folder, sum(count for _, count in store.usable_parts(prompts, size))
    for note in _pools_below(root):
        with suppress(OSError, ValueError):
            if note.parent.resolve() != folder.resolve() and parsed_json(note.read_text()) == draws:
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
            # Another file system, or one without links.
            with atomic_write(target, shared=True) as staged:
                shutil.copyfile(path, staged)
    return f"{most:,} completions of {best} are reused".replace(",", " ")


@cache
def scored_with() -> str:
    """Return the versions of the packages that scores are computed with here."""
    installed = versions()
    return ", ".join(f"{name} {installed[name]}" for name in SCORING_PACKAGES)


def _digest(arrays: dict[str, np.ndarray]) -> str:
    """Compute a checksum of arrays: names, dtypes, shapes and bytes."""
    total = hashlib.blake2b(digest_size=16)
    for name, array in sorted(arrays.items()):
        total.update(f"{name} {array.dtype} {array.shape}".encode())
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()


def _gapless(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the sorted (first, count) that follow each other from 0 on.

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
    """Write completions.parquet: the first few completions of every question, or of evenly spaced.

    The study goes on without it where the disk refuses. Answers of imported completions are not
    read.
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
