"""Verbs of `grpo-ustat VERB ...` with purposes, examples and suggestions for misspelt verbs.

Apart from `command_line`, this module imports only the standard library.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from grpo_ustat.config.command_line import command_line, program


@dataclass(frozen=True)
class Verb:
    """A verb of `grpo-ustat VERB`."""

    # Purpose in one line.
    purpose: str
    # Example arguments.
    example: tuple[str, ...]
    # Module with the `main` function of a verb that has no package.
    module: str = ""


VERBS = {
    "train": Verb(
        "fine-tune a language model by GRPO, with any baseline and group size",
        ("group_size=16", "max_steps=200"),
    ),
    "mse": Verb(
        "measure the gradient's error at each group size, find the best size",
        ("model=tiny_base", "study.questions=100"),
    ),
    "gap": Verb(
        "test the paper's theorems on problems with known exact values", ("theorem=lemma6",)
    ),
    "advise": Verb(
        "say whether to keep, raise or lower the group size of a run or log",
        ("outputs/train/NAME/seed-0", "num_generations=8"),
    ),
    "convert": Verb(
        "convert rollouts of TRL, verl, NeMo-RL, prime-rl ... for mse",
        ("rollouts/", "rollouts.parquet"),
        "grpo_ustat.cli.convert",
    ),
    "report": Verb(
        "make figures, tables and a page for any runs, finished or not", ("runs=outputs/train",)
    ),
    "sweep": Verb(
        "show the progress of the runs of a sweep",
        ("status", "outputs/train"),
        "grpo_ustat.cli.sweep",
    ),
    "doctor": Verb(
        "check that this machine is ready for runs, and suggest fixes",
        ("--output", "outputs"),
    ),
}


def help_text() -> str:
    """Return the text of `grpo-ustat --help`: all verbs with purpose and example."""
    width = max(map(len, VERBS))
    lines = [
        "Measure the error of GRPO policy gradients, choose the group size, and train.",
        "",
        f"usage: {program()} VERB [arguments]",
        "",
    ]
    for name, verb in VERBS.items():
        lines.append(f"  {name:{width}}  {verb.purpose}")
        lines.append(f"  {'':{width}}    {command_line(name, *verb.example)}")
    lines += ["", f"{program()} VERB --help  arguments of the verb"]
    return "\n".join(lines)


def unknown_verb(word: str) -> str:
    """Return the error message for a word that is not a verb."""
    if word.startswith("-") or "=" in word:
        return f"{word} comes after a verb, as in {command_line('train', word)}"
    near = difflib.get_close_matches(word.lower(), VERBS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(VERBS)}"
    return f"unknown command {word!r}: {hint}"
