"""Kept pools: one file per question and part, so that a study resumes, extends and is reused.

A pool folder holds `pool.json`, which says what its completions are draws of, and for every
question one safetensors file per part: completions `first ... first + count` of that question with
rewards, squared norms and inner products among the part's completions, and sketches. Adding
completions adds parts; nothing that is there is sampled or scored again.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from grpo_ustat.checks import ConfigError
from grpo_ustat.config import MseConfig
from grpo_ustat.identity import choices, data_fingerprint, weights_fingerprint
from grpo_ustat.records import Prompt
from grpo_ustat.study.workers import Done


@dataclass(frozen=True)
class Part:
    """N scored completions of one question.

    Attributes:
        rewards_N, lengths_N, ended_N, tokens_NT: the completions; tokens are padded with 0.
        gram_NN: <s_i, s_j>.
        features_NR: sketches of the scores.
        reward_sum_R, score_sum_R: wider sketches of `sum_i z_i s_i` and `sum_i s_i`.
        cost: what it took, as the fields of `Done`.
    """

    rewards_N: np.ndarray
    lengths_N: np.ndarray
    ended_N: np.ndarray
    tokens_NT: np.ndarray
    gram_NN: np.ndarray
    features_NR: np.ndarray
    reward_sum_R: np.ndarray
    score_sum_R: np.ndarray
    cost: np.ndarray

    @property
    def done(self) -> Done:
        """The cost as a record."""
        counts, seconds = self.cost[:5].astype(int), self.cost[5:]
        return Done(*counts.tolist(), *seconds.tolist())


def draws_of(config: MseConfig) -> dict[str, Any]:
    """What decides a pool's completions and scores: a pool serves every study that agrees."""
    keys = choices(asdict(config))
    chosen = ("model", "dataset", "prompt", "seed", "temperature", "max_completion_length")
    budget = ("feature_sketch", "gradient_sketch")
    found = {key: keys[key] for key in chosen} | {key: keys["budget"][key] for key in budget}
    for key in ("study_size", "train_size", "test_size"):
        found["dataset"].pop(key, None)
    found["weights"] = weights_fingerprint(config.model.model_name_or_path)
    return found | {"data": data_fingerprint(config.dataset)}


class PoolStore:
    """The files of one pool folder.

    Args:
        folder: need not exist.
        draws: see `draws_of`.
    """

    def __init__(self, folder: Path, draws: dict[str, Any]):
        self.folder, self.draws = folder, draws

    def open(self) -> None:
        """Create the folder, or check that it holds draws of the same policy and settings.

        Raises:
            ConfigError: it holds others, or cannot be read or written.
        """
        note = self.folder / "pool.json"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not note.is_file():
                _create(note, json.dumps(self.draws, indent=1))
            there = json.loads(note.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"the pool folder {self.folder} cannot be used: {error}") from error
        for key in dict.fromkeys([*there, *self.draws]):
            if there.get(key) != self.draws.get(key):
                raise ConfigError(
                    f"{self.folder} holds completions of {key}={there.get(key)}, asked is "
                    f"{self.draws.get(key)}: use another pool=DIR"
                )

    def parts(self, prompt: Prompt) -> list[tuple[int, int]]:
        """(first, count) of the question's parts, in order, without gaps from 0 on."""
        stem = _stem(prompt)
        names = [path.stem.split("-")[1:] for path in self.folder.glob(f"{stem}-*.safetensors")]
        found = sorted((int(first), int(count)) for first, count in names)
        whole, reached = [], 0
        for first, count in found:
            if first == reached:
                whole.append((first, count))
                reached += count
        return whole

    def write(self, prompt: Prompt, first: int, part: Part) -> None:
        """Write one part whole or not at all."""
        path = self._path(prompt, first, len(part.rewards_N))
        arrays = {key: np.ascontiguousarray(value) for key, value in vars(part).items()}
        _replace(path, lambda staged: save_file(arrays, staged, {"prompt": prompt.id}))

    def read(self, prompt: Prompt, first: int, count: int) -> Part:
        """One part.

        Raises:
            ConfigError: the file is damaged.
        """
        path = self._path(prompt, first, count)
        try:
            return Part(**load_file(path))
        except (OSError, SafetensorError, TypeError) as error:
            raise ConfigError(f"{path} is damaged: delete it, it will be made again") from error

    def _path(self, prompt: Prompt, first: int, count: int) -> Path:
        return self.folder / f"{_stem(prompt)}-{first}-{count}.safetensors"


def _stem(prompt: Prompt) -> str:
    text = f"{prompt.id}\x1f{prompt.text}\x1f{prompt.answer}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _replace(path: Path, write) -> None:
    staged = _staged(path)
    write(staged)
    os.replace(staged, path)


def _create(path: Path, text: str) -> None:
    """Write a file whole unless it is there: of all that begin a pool at once, one says of what.

    Raises:
        OSError: the file system refuses it.
    """
    staged = _staged(path)
    staged.write_text(text)
    try:
        os.link(staged, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        os.replace(staged, path)
    staged.unlink(missing_ok=True)


def _staged(path: Path) -> Path:
    return path.with_name(f".{path.name}.{uuid4().hex}.tmp")
