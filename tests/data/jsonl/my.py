"""A reward of one's own, as docs/models-and-data.md shows it."""


def score(prompt, completion):
    """1 for the right number at the end; at level 2, 0.5 for any other number."""
    last = completion.replace("####", " ").replace("=", " ").split()[-1:]
    if last == [prompt.answer]:
        return 1.0
    return 0.5 * (prompt.columns["level"] == 2 and "".join(last).isdecimal())
