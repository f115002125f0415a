"""User-defined tasks and rewards, loaded from entry points of packages or from a file.

A task is an entry point in the group `grpo_ustat.tasks`. It is called with `dataset.options` as
keyword arguments. It returns an object with the methods `questions(split)`, `reward(prompt,
completion)` and optionally `extract(completion)`.

A reward is a function of a prompt and a completion. It is an entry point in the group
`grpo_ustat.rewards`, or a function FILE:FUNCTION. As `dataset.reward` it replaces the rewards of
the data set's judge; in `reward_funcs` it is added to them.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import sys
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import CodeType
from typing import Any, cast

from grpo_ustat.config.own_functions import TASKS, check_reward_call, reward_file
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.records import MAX_REWARD, Prompt, Question, is_number
from grpo_ustat.terminal.streams import SURROGATE

# For each split, the splits that must not contain the same questions.
DISJOINT_FROM = {
    "train": ("test", "examples"),
    "test": ("examples",),
    "study": ("examples",),
    "examples": (),
}


class OwnSource:
    """Source that takes the questions from a user's task, a given number for each split.

    Args:
        name: name of the entry point.
        options: keyword arguments for the entry point, `dataset.options`.
        sizes: number of questions in `train`, `test`, `study` and `examples`; None for all
            questions of the split.
    """

    def __init__(self, name: str, options: Mapping[str, Any], sizes: Mapping[str, int | None]):
        self._name, self._sizes = describe(TASKS, name), sizes
        with user_errors(self._name):
            # Object returned by the entry point.
            self.task = entry_point(TASKS, name)(**options)
        check_method(self._name, self.task, "questions", "split")

    def questions(self, split: str) -> list[Question]:
        """Return the first questions of the task's split, as many as configured."""
        questions = self._cut(split)
        others = [
            q for other in DISJOINT_FROM[split] if self._sizes[other] != 0 for q in self._cut(other)
        ]
        counts = Counter(question.id for question in questions)
        counts.update({question.id for question in others})
        twice = next((name for name, count in counts.items() if count > 1), None)
        if twice is not None:
            raise ConfigError(
                f"{self._name} has two {split} questions with id {twice!r}, or one that is also in "
                f"{' or '.join(DISJOINT_FROM[split])}: make ids unique, and put each question "
                "in only one split"
            )
        return questions

    def _cut(self, split: str) -> list[Question]:
        with user_errors(f"{self._name}, questions({split!r})"):
            questions = list(self.task.questions(split))
        for question in questions:
            if not isinstance(question, Question):
                raise ConfigError(
                    f"{self._name}: questions({split!r}) contains {question!r:.60}, but it must "
                    "contain only grpo_ustat.records.Question"
                )
            for name in ("id", "text", "answer", "kind", "solution"):
                if SURROGATE.search(text := str(getattr(question, name))):
                    raise ConfigError(
                        f"{self._name}: questions({split!r}) contains {text!r:.60} as {name}, but "
                        "it must be text without surrogate characters"
                    )
        count = self._sizes[split]
        if count is not None and count > len(questions):
            key = "prompt.shots" if split == "examples" else f"dataset.{split}_size"
            raise ConfigError(
                f"{key}={count}, but {self._name} has {len(questions)} {split} questions: "
                f"use {key}={len(questions)} or less"
            )
        return questions[:count]


class OwnJudge:
    """Judge that calls a user's reward function for each completion.

    Args:
        reward: function that takes a `Prompt` and a completion and returns a finite number; it can
            be an `async def`.
        extract: function that extracts the answer from a completion; if None, the whole completion
            is the answer.
        name: name of these functions in error messages.
    """

    def __init__(
        self,
        reward: Callable[[Prompt, str], float | Awaitable[float]],
        extract: Callable[[str], str | None] | None = None,
        name: str = "the reward",
    ):
        self.counts: Counter[str] = Counter()
        self._reward, self._extract, self._name = reward, extract, name
        # Some functions written in C have no signature; these are not checked.
        with suppress(TypeError):
            check_reward_call(name, signature_of(reward))
        # Event loop that runs the calls of an `async def`, and id of the process that created it.
        self._loop: Any = None
        self._loop_of = 0

    def extract(self, completion: str) -> str | None:
        """Return the answer that the user's function extracts.

        If there is no such function, return the whole completion, or None if it is empty.
        """
        if self._extract is None:
            return completion.strip() or None
        with user_errors(f"{self._name}, extract"):
            return self._extract(completion)

    def rewards(self, prompts: list[Prompt], completions: list[str]) -> list[float]:
        """Return the reward of each completion; calls of an `async def` run concurrently."""
        names = [f"{self._name}, {prompt.where or f'prompt {prompt.id}'}" for prompt in prompts]
        rewards = []
        for name, prompt, text in zip(names, prompts, completions, strict=True):
            with user_errors(name):
                rewards.append(self._reward(prompt, text))
        if any(map(inspect.isawaitable, rewards)):
            rewards = self._awaited(rewards, names)
        return [_finite(reward, name) for reward, name in zip(rewards, names, strict=True)]

    def _awaited(self, rewards: list[Any], names: list[str]) -> list[Any]:
        """Await the coroutines in `rewards` and return all rewards, or raise the first error."""
        import asyncio

        async def await_reward(reward: Any, name: str) -> Any:
            with user_errors(name):
                return await reward if inspect.isawaitable(reward) else reward

        async def await_all() -> list[Any]:
            tasks = map(await_reward, rewards, names)
            return await asyncio.gather(*tasks, return_exceptions=True)

        # A forked process cannot use its parent's event loop.
        if self._loop is None or self._loop_of != os.getpid():
            self._loop, self._loop_of = asyncio.new_event_loop(), os.getpid()
        outcomes = self._loop.run_until_complete(await_all())
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes


def _finite(reward: Any, name: str) -> float:
    """Convert a reward, which can be a NumPy scalar or a tensor with one value, to a float."""
    number = reward
    if callable(getattr(reward, "item", None)):
        # `item` fails if a tensor has several values; the check below then refuses it.
        with suppress(Exception):
            number = reward.item()
    if not is_number(number, MAX_REWARD):
        with user_errors(name):
            shown = "an integer with many digits" if isinstance(number, int) else repr(reward)
        raise ConfigError(
            f"{name}: the reward is {shown:.60}, but each call must return one finite number with "
            f"an absolute value of at most {MAX_REWARD:g}"
        )
    return float(number)


def check_method(name: str, task: Any, method: str, *arguments: str) -> None:
    """Raise an error if the task has no method that accepts the given arguments.

    Args:
        name: name of the task, for the error message.
        task: object returned by the task's entry point.
        arguments: names of the arguments.
    """
    function, call = getattr(task, method, None), f"{method}({', '.join(arguments)})"
    if not callable(function):
        raise ConfigError(f"{name} returned {task!r:.60}, which has no method {call}: add it")
    with suppress(TypeError):
        signature = signature_of(function)
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise ConfigError(
                f"{name}: {method} has the signature {signature!s:.120}, but it is called as {call}"
            ) from error


def signature_of(function: Any) -> inspect.Signature:
    """Return the signature of a function.

    Raises:
        TypeError: the signature is unknown, as for some functions written in C.
    """
    try:
        return inspect.signature(function)
    except ValueError as error:
        raise TypeError from error


def describe(group: str, name: str) -> str:
    """Format the group and name of an entry point for error messages."""
    return f"{group} entry point {name!r}"


def entry_point(group: str, name: str) -> Any:
    """Load the object that an installed package registers under a name.

    `data_config` has already checked that the name exists.
    """
    return importlib.metadata.entry_points(group=group)[name].load()


class _FreshSource(SourceFileLoader):
    """Loader that ignores cached bytecode.

    A cache is validated only by the file's time and size, so it could be of an older version.
    """

    def get_code(self, fullname: str) -> CodeType:
        """Compile the file's source; see `InspectLoader.get_code`."""
        return self.source_to_code(self.get_data(self.path), self.path)


@cache
def file_function(reward: str, field_name: str) -> Callable[[Prompt, str], float]:
    """Load the function that FILE:FUNCTION names.

    Only this file is loaded. Modules that it imports must be installed.

    Args:
        reward: FILE:FUNCTION.
        field_name: configuration field with this value, for error messages.
    """
    location = reward_file(reward)
    assert location is not None, "an entry point instead of FILE:FUNCTION"
    file, name = location
    loader = _FreshSource(f"grpo_ustat_reward_{file.stem}", str(file))
    spec = spec_from_loader(loader.name, loader)
    # The assertion is for the type checker: `spec_from_loader` returns a spec for every loader.
    assert spec is not None
    # Dataclasses defined in the module look up the module in `sys.modules`.
    module = sys.modules[loader.name] = module_from_spec(spec)
    with user_errors(f"{field_name}={reward}"):
        loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{field_name}={reward}: {name} is not a function in {file}")
    return cast(Callable[[Prompt, str], float], function)


@contextmanager
def user_errors(source: str) -> Iterator[None]:
    """Convert an exception in user code into a one-line ConfigError with its file and line."""
    try:
        yield
    except BaseException as error:
        # SystemExit is converted too. Otherwise user code could end the run as if it had finished.
        if isinstance(error, KeyboardInterrupt | GeneratorExit):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        try:
            text = str(error)
        except Exception:
            text = "its message cannot be read"
        raise ConfigError(
            f"{source}: {type(error).__name__}: {text} ({last.filename}, line {last.lineno})"
        ) from error
