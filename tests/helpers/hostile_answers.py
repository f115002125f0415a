"""Texts that were written to hang, crash or fool a judge of answers.

HOSTILE stalls sympy or the parser; no text is right. LENIENT is accepted by math-verify alone.
"""

from __future__ import annotations


def _nested(left: str, right: str, depth: int, core: str = "7") -> str:
    """Put a text between many nested brackets in a box."""
    return r"\boxed{" + left * depth + core + right * depth + "}"


HOSTILE = {
    "9^{9^{9^9}}": r"\boxed{9^{9^{9^9}}}",
    "9^{9^9}": r"\boxed{9^{9^9}}",
    "10^10^10": r"\boxed{10^10^10}",
    "9**9**9**9": r"\boxed{9**9**9**9}",
    "100000000!": r"\boxed{100000000!}",
    "((9!)!)!": r"\boxed{((9!)!)!}",
    "binomial": r"\boxed{\binom{10000000}{5000000}}",
    "500 braces": _nested("{", "}", 500),
    "20000 braces": _nested("{", "}", 20_000),
    "500 parentheses": _nested("(", ")", 500),
    "140 parentheses": _nested("(", ")", 140),
    "200 \\frac": _nested(r"\frac{", "}{1}", 200),
    "1+1+... 100k": rf"\boxed{{{'1+' * 50_000}1}}",
    "1+1+... 300": rf"\boxed{{{'1+' * 148}1}}",
    "sum to 10^8": r"\boxed{\sum_{k=1}^{100000000} \frac{1}{k^2}}",
    "(x+1)^{2000}": r"\boxed{(x+1)^{2000}}",
    "(x+y+z)^{900}": r"\boxed{(x+y+z)^{900}}",
    "integral": r"\boxed{\int_0^1 \frac{\sin(x^3)\ln(1+x)}{\sqrt{1+x^5}} dx}",
    "product": r"\boxed{\prod_{k=1}^{10000000} k}",
    "matrix power": r"\boxed{\begin{pmatrix}1&1\\1&0\end{pmatrix}^{100000000}}",
    "root tower": _nested(r"\sqrt{2+", "}", 28, "2"),
    "prose with numbers": "so 12 and 7 make 42, " * 5000,
    "dollars": "$4$ $2$ " * 12_500,
    "digits": "42" * 50_000,
    "2000 boxes": r"\boxed{7} " * 2000,
    "14000 open boxes": r"\boxed{" * 14_000,
    "50000 digits": rf"\boxed{{{'7' * 50_000}}}",
    "1/0": r"\boxed{1/0}",
    "empty": "",
    "empty box": r"\boxed{}",
    "NUL": "\\boxed{4\x002}",
    "lone surrogate": "\\boxed{\ud8004}",
    "100k backslashes": "\\" * 100_000,
    "100k spaces": r"\boxed{4" + " " * 100_000 + "2}",
    "100k commas": rf"\boxed{{{',' * 100_000}}}",
}
# Question, gold, text.
LENIENT = (
    ("37 + 45 - 12 =", "70", r"\boxed{37 + 45 - 12}"),
    ("37 + 45 - 12 =", "70", "37 + 45 - 12"),
    ("2 + 1 =", "3", "1 2 3"),
    ("2 + 1 =", "3", r"\boxed{1 2 3}"),
    ("2 + 1 =", "3", "answer 3 then 4"),
    ("2 + 1 =", "3", r"\boxed{x=3}"),
    ("2 + 1 =", "3", r"\boxed{4=3}"),
    ("2 + 1 =", "3", r"\boxed{3\%}"),
    ("2 + 1 =", "3", r"\boxed{6/2}"),
    ("2 + 1 =", "3", r"\boxed{\frac{6}{2}}"),
    ("2 + 1 =", "3", r"\boxed{3} or \boxed{4}"),
    ("2 + 1 =", "3", r"\boxed{3, 4}"),
    (r"Simplify $\frac{6}{8}$.", r"\frac{3}{4}", r"\boxed{\frac{6}{8}}"),
    (r"Simplify $\frac{1}{2}+\frac{1}{4}$.", r"\frac{3}{4}", r"\boxed{\frac12 + \frac14}"),
    ("Expand $(x-1)(x+1)$.", "x^2-1", r"\boxed{(x-1)(x+1)}"),
    (r"Simplify $\sqrt{50}$.", r"5\sqrt{2}", r"\boxed{\sqrt{50}}"),
    ("Find it.", "1101_2", r"\boxed{1101_3}"),
    ("Find it.", "204_5", r"\boxed{204_{10}}"),
    ("Find it.", "4_5", r"\boxed{4}"),
    ("Which point?", "(1,2)", r"\boxed{\{1,2\}}"),
    ("Which point?", "(1,2)", r"\boxed{1,2}"),
    ("Which values?", "1,2", r"\boxed{(2,1)}"),
    ("Find it.", r"\frac{\pi}{2}", r"\boxed{\frac{\pi}{3} = \frac{\pi}{2}}"),
    ("Which ratio?", "1:2", r"\boxed{\frac{1}{2}}"),
)
