"""Symbols on pages and their meanings, and the displayed names of baselines.

All pages use the same symbols. Below the answer of a page, `grpo_ustat.pages.page` lists the
symbols that occur on the page, with their meanings. `docs/glossary.md` defines further terms.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

SYMBOLS = {
    "G*": "best group size: the one with the smallest gradient error at a fixed n",
    "G": "group size: number of completions per prompt",
    "n": "number of rollouts per step, n = B G",
    "B": "number of prompts per step",
    "MSE": "mean squared error: mean squared distance of the gradient estimate from the gradient",
    "C1": "variance of the gradient between prompts; it contributes C1/B to the MSE",
    "C2": "variance of the gradient within a prompt, with the oracle as baseline; it contributes "
    "C2/(B G) to the MSE",
    "C3": "extra variance due to the group mean as baseline; it contributes C3/(B G (G-1)) to the "
    "MSE",
    "corr(q, Z)": "correlation of squared score norm and reward, averaged over prompts",
    "A_0": "E[q Z^2], the size of the gradient noise without a baseline (vanilla)",
    "A_V": "E[q (Z - V)^2], the size of the gradient noise with the oracle as baseline",
    "A_b*": "E[q (Z - b*)^2], the size of the gradient noise with the best baseline that depends "
    "only on the prompt, b* = E[q Z]/E[q]",
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
# A match must not be part of a word, a number or a path.
_START, _END = r"(?<![\w.\\^*-])(?<![a-z.]{2}/)", r"(?![\w*])"
PATTERN = re.compile(
    "|".join(
        f"{_START}{re.escape(symbol)}{'' if symbol.endswith(')') else _END}"
        for symbol in sorted(SYMBOLS, key=len, reverse=True)
    )
)
# Displayed names of alarms, keyed by the alarm's name in result.json.
ALARM_WORDS = {"zero_variance": "zero-variance groups"}
# Displayed names of baselines, if they differ from the names in the configuration.
BASELINE_WORDS = {"none": "vanilla (no baseline)"}


def legend(texts: Iterable[str]) -> dict[str, str]:
    """Return the meanings of the symbols that occur in any of the texts, in dictionary order.

    >>> legend(["The best G is about 4.1"])
    {'G': 'group size: number of completions per prompt'}
    """
    used = {match[0] for text in texts for match in PATTERN.finditer(text)}
    # The symbol corr(q, Z) contains q and Z.
    if "corr(q, Z)" in used:
        used |= {"q", "Z"}
    return {symbol: meaning for symbol, meaning in SYMBOLS.items() if symbol in used}


def baseline_word(name: str) -> str:
    """Return the displayed name of a baseline; only `none` is displayed differently."""
    return BASELINE_WORDS.get(name, name)
