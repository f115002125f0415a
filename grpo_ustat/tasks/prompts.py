"""How a question is put to the model: a template, solved examples, the model's chat format."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from grpo_ustat.records import Prompt, Question

FIELDS = ("question", "answer", "solution")
Turn = dict[str, str]  # role and content, as chat templates take them


def render(template: str, question: Question) -> str:
    """The template with a question's fields in their places; no other braces are special.

    >>> render("Q: {question} {x}", Question("", "2^{answer}", "4", "", ""))
    'Q: 2^{answer} {x}'
    """
    values = {"question": question.text, "answer": question.answer, "solution": question.solution}
    pattern = "|".join(f"{{{name}}}" for name in FIELDS)
    return re.sub(pattern, lambda match: values[match.group()[1:-1]], template)


@dataclass(frozen=True)
class Prompting:
    """How a question becomes a prompt.

    Attributes:
        template: of a question.
        reply: of what follows a solved example's question; None: there are no examples.
        examples: questions that are shown solved, the same before every question.
        system: the system turn of a chat; None: the chat template's own, if it has one.
        chat: writes turns in the model's chat format; None: plain text.
    """

    template: str
    reply: str | None = None
    examples: tuple[Question, ...] = ()
    system: str | None = None
    chat: Callable[[list[Turn]], str] | None = None

    def prompt(self, question: Question) -> Prompt:
        """The prompt of a question, as the policy reads it."""
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
