r"""The shapes of answers: which forms can answer for a gold of which form."""

from __future__ import annotations

import re

from grpo_ustat.tasks.math_latex import bare

FITTING = {  # shapes of answers to each shape of a gold
    "one": {"one", "list", "set", "tuple", "named", "range"},
    "range": {"one", "list", "set", "tuple", "named", "range"},
    "list": {"one", "list", "set", "named"},
    "set": {"one", "list", "set"},
    "named": {"list", "tuple", "named"},
    "tuple": {"tuple", "named"},
}
_UNEQUAL = re.compile(r"\\(?:[lg]eq?|[lg]eqslant|[lg]t|neq?)(?![a-zA-Z])|>")
_IN = re.compile(r"^\s*[a-zA-Z] ?\\in(?![a-zA-Z])")
_RELATION = re.compile("[<=]")
_NAME = re.compile(r"[a-zA-Z]|[a-zA-Z]\([a-z]\)|\([a-z](?:,[a-z])+\)")


def misshapen(question: str, gold: str, answer: str) -> bool:
    r"""Whether an answer that is not the gold's text has a form that cannot answer for it.

    A time, a ratio or a subscript of digits is met by its text alone; a tuple by a tuple; a list by
    a list or a set. An answer to a gold without a relation has none but of one name and what it
    is (`x=5`, `0<x<2`), and a range answers only for an interval.

    >>> pairs = ("6:00", "6"), ("(1,2)", r"\{1,2\}"), (r"\pi", r"\pi=\pi"), ("[0,1)", r"x^2<x")
    >>> [misshapen("", *pair) for pair in pairs], misshapen("", "[0,1)", r"0\le x<1")
    ([True, True, True, True], False)
    """
    gold, answer = (bare(_UNEQUAL.sub("<", _IN.sub("", latex))) for latex in (gold, answer))
    if re.search(r"\d:\d|\d_", gold) or (re.search(r"[\d})]_", answer) and "_" not in gold):
        return True
    gold, answer = (re.sub(r"_\{[^{}]*\}", "", text) for text in (gold, answer))  # of sums: k=1
    wanted, given = _shape(gold), _shape(answer)
    if _RELATION.search(answer) and not _RELATION.search(gold):
        if not all(map(_says_of_one_name, _parts(answer))):
            return True
        if given == "range" and wanted == "tuple":
            return not _is_interval(gold, question)
    return given not in FITTING[wanted]


def _shape(text: str) -> str:
    """One of `FITTING`: "named" is a list such as x=1,y=2, "range" what an inequality says."""
    parts = _parts(text)
    if len(parts) > 1:
        names = [part[0] for part in parts if re.match("[a-zA-Z]=", part)]
        return "named" if len(set(names)) == len(parts) and names == sorted(names) else "list"
    if "=" not in text and _RELATION.search(text):
        return "range"
    text = text.rpartition("=")[2]
    if len(_parts(text[1:-1])) > 1 and text[0] in "([" and text[-1] in ")]":
        return "tuple"
    return "set" if text.startswith("\\{") and text.endswith("\\}") else "one"


def _parts(text: str) -> list[str]:
    """Split at the commas outside brackets; at none where a bracket closes that was not open."""
    depth, cuts = 0, [-1]
    for i, sign in enumerate(text):
        depth += (sign in "([{") - (sign in ")]}")
        if depth < 0:
            return [text]
        if sign == "," and not depth:
            cuts.append(i)
    return [text[a + 1 : b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _says_of_one_name(part: str) -> bool:
    """Whether a part has no relation, or one between a name and terms without it."""
    terms = _RELATION.split(part)
    names = [term for term in terms if _NAME.fullmatch(term)]
    if len(terms) == 1:
        return True
    if len(names) != 1 or len(terms) > 3 or ("=" in part and terms != [*names, terms[1]]):
        return False
    letters = set(re.findall("[a-zA-Z]", names[0].partition("(")[0] or names[0]))
    others = [re.sub(r"\\[a-zA-Z]+", "", term) for term in terms if term != names[0]]
    return not letters.intersection("".join(others))


def _is_interval(gold: str, question: str) -> bool:
    """Whether a pair in brackets is surely no point."""
    return "\\infty" in gold or gold[0] + gold[-1] != "()" or "interval" in question.lower()
