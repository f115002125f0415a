"""Prompt templates."""

QUESTION, SHOTS = "{question}", "{shots}"


def render(template: str, question: str, shots: str = "") -> str:
    """The template with question and solved examples in their places; no other braces are special.

    >>> render("Q: {question} {x}", "1+1")
    'Q: 1+1 {x}'
    """
    return template.replace(SHOTS, shots).replace(QUESTION, question)
