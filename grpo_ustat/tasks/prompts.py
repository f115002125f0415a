"""Prompt templates."""

QUESTION = "{question}"


def render(template: str, question: str) -> str:
    """The template with the question in its place; no other braces are special.

    >>> render("Q: {question} {x}", "1+1")
    'Q: 1+1 {x}'
    """
    return template.replace(QUESTION, question)
