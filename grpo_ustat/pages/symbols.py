"""The symbols that pages print, each with its meaning, and the names of baselines there.

One dictionary for every page: `grpo_ustat.pages.page` shows the meanings of those symbols that a
page prints below its answer, and again where a symbol is pointed at. `docs/glossary.md` has more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

SYMBOLS = {
    "G*": "the best group size: that of the smallest gradient error at a fixed n",
    "G": "group size: completions of one prompt",
    "n": "rollouts of a step, n = B G",
    "B": "prompts of a step",
    "MSE": "mean squared error: mean squared distance of the gradient estimate from the gradient",
    "C1": "variance of the gradient between prompts; its part of the MSE is C1/B",
    "C2": "variance within a prompt, of a gradient with the oracle as baseline; part C2/(B G)",
    "C3": "extra variance of the group mean as baseline; part C3/(B G (G-1))",
    "corr(q, Z)": "correlation of squared score norm and reward, averaged over prompts",
    "A_0": "E[q Z^2], the size of the gradient's noise without a baseline (vanilla)",
    "A_V": "E[q (Z - V)^2], the size of the gradient's noise with the oracle as baseline",
    "A_b*": "E[q (Z - b*)^2], the same with b* = E[q Z]/E[q], the best baseline of the prompt "
    "alone",
    "q": "squared norm of a completion's score, the gradient of its log-probability",
    "Z": "reward of a completion",
    "V": "expected reward of a prompt",
    "S": "score of a completion, the gradient of its log-probability",
    "sigma": "standard deviation of the rewards of a prompt",
    "J*": "largest expected reward that the policy can reach",
    "J": "expected reward of the policy over all prompts",
    "theta": "parameters of the policy",
    "eta_t": "learning rate of step t",
    "T": "number of steps",
}
# A symbol is no part of a word, a number or a path.
_START, _END = r"(?<![\w.\\^*-])(?<![a-z.]{2}/)", r"(?![\w*])"
PATTERN = re.compile(
    "|".join(
        f"{_START}{re.escape(symbol)}{'' if symbol.endswith(')') else _END}"
        for symbol in sorted(SYMBOLS, key=len, reverse=True)
    )
)
# Words for an alarm, by its key in result.json.
ALARM_WORDS = {"zero_variance": "zero-variance groups"}
# Words shown to a reader in place of the value that is typed.
BASELINE_WORDS = {"none": "vanilla (no baseline)"}


def parts(text: str) -> Iterator[tuple[str, str | None]]:
    """Split a text into pieces, each with the meaning of its symbol, or None if it is no symbol.

    >>> [piece for piece, meaning in parts("MSE at G = 4, G* and corr(q, Z) in GB") if meaning]
    ['MSE', 'G', 'G*', 'corr(q, Z)']
    """
    end = 0
    for match in PATTERN.finditer(text):
        yield text[end : match.start()], None
        yield match[0], SYMBOLS[match[0]]
        end = match.end()
    yield text[end:], None


def legend(texts: Iterable[str]) -> dict[str, str]:
    """Return the meanings of the symbols that any of the texts has, in the dictionary's order.

    >>> legend(["Best G is about 4.1"])
    {'G': 'group size: completions of one prompt'}
    """
    used = {match[0] for text in texts for match in PATTERN.finditer(text)}
    # These symbols are printed within it.
    if "corr(q, Z)" in used:
        used |= {"q", "Z"}
    return {symbol: meaning for symbol, meaning in SYMBOLS.items() if symbol in used}


def baseline_word(name: str) -> str:
    """Return the name of a baseline as a person reads it: its own name, except for `none`."""
    return BASELINE_WORDS.get(name, name)
