"""`--help`: purpose, example commands and the most-used fields on a page of 60 lines.

An override next to `--help`, such as `model=tiny`, adds the fields that it sets. `--help all` shows
all fields and the choices of all config groups, and `--help WORD` those whose texts contain a word.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from argparse import Namespace
from collections.abc import Iterator
from itertools import groupby

from grpo_ustat.cli.options import CommandOptions, Field, command_options, default_options
from grpo_ustat.config.schema import ConfigError, FieldInfo
from grpo_ustat.terminal.streams import beside

# Most-used config groups and fields of each command, by topic. The help of a command that is not
# listed here shows all fields.
SECTIONS: dict[str, dict[str, str]] = {
    "mse": {
        "The policy and its questions": "model dataset dataset.path dataset.reward prompt "
        "prompt.shots reward_funcs reward_weights max_completion_length temperature",
        "What is measured": "group_sizes baselines objective baseline objectives objective.beta "
        "study.rollouts study.questions study.until study.parameters budget "
        "budget.pool_completions",
        "Rollouts made elsewhere": "pool study.cut_at study.scored_by study.corrections",
        "The run": "experiment debug dry_run seed launch.device launch.num_processes "
        "launch.workers rollout output_root on_existing logger",
    },
    "train": {
        "The policy and its questions": "model lora dataset dataset.path dataset.reward prompt "
        "prompt.shots reward_funcs reward_weights max_completion_length temperature",
        "The update": "group_size budget.rollouts baseline objective objective.beta "
        "objective.num_minibatches objective.num_iterations learning_rate schedule max_grad_norm "
        "max_steps bf16 gradient_checkpointing",
        "What is kept": "eval_steps eval.num_generations save_steps monitor.gradient_mse_every "
        "output_root on_existing logger",
        "The run": "experiment debug dry_run seed launch.device launch.num_processes "
        "launch.fsdp2 rollout",
    },
    "gap": {
        "What is tested": "theorem theorem.problem theorem.rollouts theorem.group_size "
        "theorem.baselines theorem.steps theorem.replicates theorem.constant_rates "
        "theorem.decaying_rate theorem.offset",
        "The run": "experiment dry_run seed launch.workers launch.num_processes "
        "output_root on_existing report.name report.steps logger "
        "project",
    },
}
# Short descriptions that fit beside a field. Other fields show their description up to the first
# semicolon.
BRIEF = {
    "model": "the policy: NAME, org/name or FOLDER",
    "dataset.path": "file or folder with your own questions",
    "dataset.reward": "your own reward function, FILE.py:FUNCTION",
    "prompt.shots": "solved examples before the question",
    "reward_funcs": "functions that score a completion",
    "reward_weights": "weights of reward_funcs",
    "temperature": "number by which logits are divided",
    "lora": "train adapters instead of all parameters",
    "group_sizes": "values of G, completions per group",
    "baselines": "baselines to compare",
    "objective": "the loss: trl_dapo, grpo, dr_grpo ...",
    "baseline": "baseline of the loss: group_std ...",
    "objectives": "further losses to measure",
    "objective.beta": "coefficient of the KL penalty",
    "objective.num_minibatches": "updates per pass over a batch",
    "objective.num_iterations": "passes over a batch",
    "study.rollouts": "n, completions per training step",
    "theorem.rollouts": "n, completions per step",
    "study.questions": "number of questions; null: all",
    "study.until": "decided: stop when the data decide on G",
    "study.parameters": "regular expression for parameter names",
    "study.cut_at": "tokens at which completions were truncated",
    "study.scored_by": "later checkpoint that learns from rollouts",
    "study.corrections": "corrections for a mismatched sampler",
    "theorem.replicates": "runs from which each number is estimated",
    "theorem.baselines": "baselines of the runs to compare",
    "budget": "precision: study or study_smoke",
    "budget.pool_completions": "completions per question",
    "budget.rollouts": "n, completions per step",
    "pool": "stored completions: DIR or FILE.parquet",
    "group_size": "G, completions per group",
    "max_grad_norm": "maximum gradient norm; null: no limit",
    "bf16": "compute in bfloat16",
    "gradient_checkpointing": "less memory, more time",
    "eval.num_generations": "completions per test question",
    "monitor.gradient_mse_every": "steps between estimates of the best G",
    "experiment": "all settings for a figure or table",
    "dry_run": "print the estimated cost and end",
    "launch.device": "cpu, cuda, mps ...",
    "launch.num_processes": "processes (ranks) on this machine",
    "launch.workers": "processes that share the work",
    "launch.fsdp2": "divide the training state among processes",
    "logger": "wandb, tensorboard or trackio",
    "rollout": "local or vllm",
    "output_root": "folder for all outputs",
    "on_existing": "resume, error or overwrite",
    "seed": "seed of all random choices",
    "theorem.problem": "the test problem: a small policy",
    "theorem.group_size": "completions per group, G",
    "theorem.steps": "steps of each run, T",
    "theorem.constant_rates": "constant learning rates",
    "theorem.decaying_rate": "c of the falling rate c / (t + offset)",
    "theorem.offset": "steps added to t in the falling rate",
}
# Field that is shown even if the selected data set does not have it, because other data sets do.
OF_ROWS = "dataset.path"
# Number of example commands on the page.
EXAMPLES = 3
# Minimum and maximum width of the page and width of its left column, in characters.
NARROWEST, WIDEST, LEFT = 60, 100, 36
# Largest number of characters of a value in the full help.
MAX_VALUE = 48
# Title of the section with the fields that the overrides next to --help set.
BY_THIS_LINE = "Set by this line"
# Parameters of ANSI escape codes.
NAME, DIM, TITLE = 36, 2, 1


def show_help(entry: str, words: Namespace) -> None:
    """Print a command's short page, its full help, or the parts with all search words."""
    overrides, search = [], []
    for word in words.overrides:
        is_override = "=" in word or word.startswith(("~", "+"))
        overrides.append(word) if is_override else search.append(word.lower())
    page = _page(entry, words, overrides)
    if search:
        _print(_full_lines(page, [word for word in search if word != "all"]))
        return
    default = {field.key.path: field.value for field in _page(entry, words, []).fields}
    paths = [x.key.path for x in page.fields if default.get(x.key.path) != x.value]
    _show(page, {BY_THIS_LINE: paths} if paths else {})


def _page(entry: str, words: Namespace, overrides: list[str]) -> CommandOptions:
    return command_options(entry, Namespace(**vars(words) | {"overrides": overrides}))


def show_default_help(entry: str) -> None:
    """Print the short page of a command without overrides; Hydra is not loaded."""
    _show(default_options(entry), {})


def _show(page: CommandOptions, further: dict[str, list[str]]) -> None:
    """Print the short page, followed by further sections."""
    sections = {title: names.split() for title, names in SECTIONS.get(page.entry, {}).items()}
    shown = sections or {"Fields": [field.key.path for field in page.fields]}
    _print(_lines(page, shown | further))


def _print(lines: Iterator[str]) -> None:
    text = "\n".join(lines)
    try:
        print(text, flush=True)
    # The reader of the pipe, such as head, has closed it. The null device receives the rest, so
    # that the interpreter does not fail at exit.
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _width() -> int:
    return max(NARROWEST, min(shutil.get_terminal_size().columns, WIDEST))


def _lines(page: CommandOptions, sections: dict[str, list[str]]) -> Iterator[str]:
    yield from _opening(page, EXAMPLES)
    yield from _sections(page, sections, _width())
    yield ""
    groups = [group.name for group in page.groups]
    if groups:
        first = next(name for names in sections.values() for name in names if name in groups)
        yield _in(
            DIM, f"--help {first}: choices of {first}; --help {first}=NAME: fields that NAME sets"
        )
    yield _in(DIM, "--help all: every field; --help WORD: search")


def _opening(page: CommandOptions, examples: int | None = None) -> Iterator[str]:
    """Yield the purpose and example commands, all of them if `examples` is None."""
    width = _width()
    yield from textwrap.wrap(page.purpose, width)
    yield ""
    for command, words in page.commands[:examples]:
        text = f"  {command}  # {words}"
        if len(text) > width:
            yield _in(DIM, f"  # {words}")
        yield _in(NAME, f"  {command}") + (_in(DIM, f"  # {words}") if len(text) <= width else "")


def _full_lines(page: CommandOptions, search: list[str]) -> Iterator[str]:
    """Yield all config groups with choices and all fields, or those with all search words."""

    def matches(*texts: str) -> bool:
        return all(word in " ".join(texts).lower() for word in search)

    lines, width = [], _width()
    for group in page.groups:
        choices = [x for x in group.choices if matches(group.name, x.name, x.words)]
        if choices or matches(group.name, group.meaning):
            title = f"{group.name}={group.chosen or 'NAME'}" if group.settable else group.name
            head, *rest = beside(title, group.meaning, LEFT, width)
            lines += ["", head.replace(title, _in(TITLE, title), 1), *rest]
            for choice in choices or group.choices:
                mark = "*" if choice.name == group.chosen else " "
                lines += beside(f"  {mark} {choice.name}", choice.words, LEFT, width)
    fields = [x for x in page.fields if matches(x.key.path, _full_meaning(x.key))]
    for node, of_node in groupby(sorted(fields, key=lambda x: bool(_node(x))), key=_node):
        meaning = f"  {page.nodes[node]}" if page.nodes.get(node) else ""
        lines += ["", _in(TITLE, node or "the run") + meaning]
        for field in of_node:
            value = textwrap.shorten(field.value, MAX_VALUE, placeholder="...")
            head, *rest = beside(
                f"  {field.key.path}={value}", _full_meaning(field.key), LEFT, width
            )
            lines += [head.replace(f"{field.key.path}=", _in(NAME, f"{field.key.path}="), 1), *rest]
    if not lines:
        raise ConfigError(f"--help has no match for {' '.join(search)!r}: use fewer words")
    if not search:
        yield from _opening(page)
    yield from lines[1:] if search else lines


def _node(field: Field) -> str:
    return field.key.path.partition(".")[0] if "." in field.key.path else ""


def _full_meaning(key: FieldInfo) -> str:
    """Return unit, description, choices and type of a field."""
    choices = f" [{' | '.join(key.choices)}]" if key.choices else ""
    return f"{key.unit} {key.meaning}{choices} ({key.kind})".strip()


def _sections(page: CommandOptions, sections: dict[str, list[str]], width: int) -> Iterator[str]:
    groups = {group.name: group for group in page.groups}
    fields = {field.key.path: field for field in page.fields}
    for title, names in sections.items():
        yield f"\n{_in(TITLE, title)}"
        for name in names:
            if name in groups:
                value, meaning = groups[name].chosen or "NAME", groups[name].meaning
            elif name in fields:
                value, meaning = fields[name].value, _meaning(fields[name].key)
            elif name == OF_ROWS:
                value, meaning = "...", ""
            else:
                continue
            is_brief = name in BRIEF and title != BY_THIS_LINE
            text = BRIEF[name] if is_brief else meaning
            head, *lines = beside(f"  {name}={value}", text, LEFT, width)
            yield head.replace(f"{name}=", _in(NAME, f"{name}="), 1)
            yield from lines


def _meaning(key: FieldInfo) -> str:
    return f"{key.unit} {key.meaning.partition(';')[0]}".strip()


def _in(colour: int, text: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if _colours() else text


def _colours() -> bool:
    """Return True if the output can show colours and NO_COLOR is not set, as in `rich`."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
