"""Construction of prompts from a template, solved examples, a question and the chat format."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from grpo_ustat.records import Prompt, Question

FIELDS = ("question", "answer", "solution")
# Message of a chat, with the keys `role` and `content` that chat templates expect.
Turn = dict[str, str]


def render(template: str, question: Question) -> str:
    """Insert a question's fields into a template; all other text in braces is kept.

    >>> render("Q: {question} {x}", Question("", "2^{answer}", "4", "", ""))
    'Q: 2^{answer} {x}'
    """
    values = {"question": question.text, "answer": question.answer, "solution": question.solution}
    pattern = "|".join(f"{{{name}}}" for name in FIELDS)
    return re.sub(pattern, lambda match: values[match.group()[1:-1]], template)


@dataclass(frozen=True)
class Prompting:
    """Format of prompts."""

    # Template of the text that contains a question.
    template: str
    # Template of the text that follows the question in a solved example; None without examples.
    reply: str | None = None
    # Solved examples, which every prompt contains.
    examples: tuple[Question, ...] = ()
    # System message of a chat; None for the default of the chat template, if it has one.
    system: str | None = None
    # Function that formats the messages of a chat for a chat model; None for plain text.
    chat: Callable[[list[Turn]], str] | None = None

    def prompt(self, question: Question) -> Prompt:
        """Return the prompt for a question, with the text that the policy receives."""
        if self.chat:
            turns = [] if self.system is None else [{"role": "system", "content": self.system}]
            for example in self.examples:
                reply = render(cast(str, self.reply), example)
                turns.append({"role": "user", "content": render(self.template, example)})
                turns.append({"role": "assistant", "content": reply})
            turns.append({"role": "user", "content": render(self.template, question)})
            text = self.chat(turns)
        else:
            text = self._plain(question)
        bare, columns, where = question.text, question.columns, question.where
        return Prompt(question.id, text, bare, question.answer, question.kind, columns, where)

    def _plain(self, question: Question) -> str:
        templates = (self.template, cast(str, self.reply))
        solved = [render(template, q) for q in self.examples for template in templates]
        return "".join(solved) + render(self.template, question)
