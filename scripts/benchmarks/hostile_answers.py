r"""Test the answer judges with texts that were written to hang, crash or fool them.

    python scripts/benchmarks/hostile_answers.py [--memory 50000] [--workers 2]

The script prints four tables:

    hostile   texts that stall sympy or the parser: verdicts of the MATH judge for the gold answers
              42 and \sqrt{2}, verdicts of math-verify without the judge, time, and peak memory of a
              worker; `number` is the answer that GSM8K's strict extraction finds
    lenient   texts that math-verify accepts and our judges must not accept
    ordinary  500 answers, half of them numbers, the rest of twelve other kinds; half are right but
              written in another form, half are wrong
    memory    resident memory over CALLS calls, with --memory CALLS
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections import Counter

import psutil

from grpo_ustat.tasks.answers import stated
from grpo_ustat.tasks.math_answers import MathJudge
from grpo_ustat.tasks.verifier import Verdict, Verifier

DEADLINE, MEMORY_GB = 2.0, 2.0


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


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", type=int, default=0, metavar="CALLS")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    verifier = Verifier(options.workers, DEADLINE, MEMORY_GB)
    began = time.perf_counter()
    verifier.judge([(r"\boxed{1}", r"\boxed{1}")])
    print(f"start of {options.workers} workers: {time.perf_counter() - began:.2f} s\n")
    hostile(verifier)
    lenient(verifier)
    ordinary(verifier)
    if options.memory:
        memory(verifier, options.memory)


def hostile(verifier: Verifier) -> None:
    """Judge each text separately, with the judge and with math-verify only."""
    judge = MathJudge(verifier)
    row = "{:<20} {:>7} {:>8} {:>6} {:>8} {:>6} {:>8} {:>6} {:>6}".format
    print(row("text", "number", "42", "s", "sqrt 2", "s", "alone", "s", "MB"))
    for name, text in HOSTILE.items():
        plain, plain_s, _ = timed(lambda t=text: judge.verdicts([("", "42", t)]))
        root, root_s, _ = timed(lambda t=text: judge.verdicts([("", r"\sqrt{2}", t)]))
        unlimited, unlimited_s, peak = timed(lambda t=text: verifier.judge([(r"\boxed{42}", t)]))
        verdicts = [verdict[0].value for verdict in (plain, root, unlimited)]
        spent = [f"{seconds:.2f}" for seconds in (plain_s, root_s, unlimited_s)]
        cells = [cell for pair in zip(verdicts, spent, strict=True) for cell in pair]
        print(row(name, (stated(text) or "-")[:7], *cells, f"{peak:.0f}"))


def lenient(verifier: Verifier) -> None:
    """Judge texts that must not be accepted, with the judges and with math-verify only."""
    row = "{:<28} {:<14} {:>7} {:>8} {:>8}".format
    print("\n" + row("text", "gold", "number", "judge", "alone"))
    for question, gold, text in LENIENT:
        (judged,) = MathJudge(verifier).verdicts([(question, gold, text)])
        (unlimited,) = verifier.judge([(rf"\boxed{{{gold}}}", text)])
        print(row(text, gold, stated(text) or "-", judged.value, unlimited.value))


def ordinary(verifier: Verifier) -> None:
    """Print times and verdicts for 500 ordinary answers, when they are new and when repeated."""
    answers = [answer(random.Random(f"ordinary {i}"), i % 2 == 0) for i in range(500)]
    print()
    for title in ("new", "seen before"):
        before, began = computed(), time.perf_counter()
        verdicts = MathJudge(verifier).verdicts([a[:3] for a in answers])
        seconds, computing = time.perf_counter() - began, computed() - before
        counts = Counter(
            ("right" if right else "wrong", verdict.value)
            for (*_, right), verdict in zip(answers, verdicts, strict=True)
        )
        print(
            f"500 ordinary answers, {title}: {seconds:.2f} s, {computing:.2f} CPU s; (truth, "
            f"verdict): {dict(counts)}"
        )
    for (_, gold, text, right), verdict in zip(answers, verdicts, strict=True):
        if verdict is not (Verdict.RIGHT if right else Verdict.WRONG):
            print(f"    gold {gold}, answer {text}: {verdict.value}, is {right}")


def memory(verifier: Verifier, calls: int) -> None:
    """Print the resident memory of this process and its workers over calls with new pairs."""
    rng = random.Random("memory")
    began = time.perf_counter()
    for done in range(0, calls + 1, 500):
        if done % (calls // 5) == 0:
            here, *others = resident()
            spent = time.perf_counter() - began
            print(f"after {done:>6} calls, {spent:5.0f} s: {here:.0f} MB, workers {others} MB")
        answers = [answer(rng, rng.random() < 0.5) for _ in range(500)]
        pairs = [(rf"\boxed{{{a[1]}}}", f"Case {done + i}. {a[2]}") for i, a in enumerate(answers)]
        verifier.judge(pairs)


def timed(work):
    """Return the work's result, its seconds, and the peak memory of the largest child in MB."""
    peak, over = [0.0], threading.Event()

    def watch():
        while not over.wait(0.02):
            peak[0] = max([*peak, *resident()[1:]])

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - began
    over.set()
    watcher.join()
    return result, seconds, peak[0]


def computed() -> float:
    """Return the CPU seconds of this process and its descendants."""
    here = psutil.Process()
    times = [process.cpu_times() for process in (here, *here.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def resident() -> list[float]:
    """Return the resident memory in MB of this process and of each descendant."""
    here = psutil.Process()
    sizes = []
    for process in (here, *here.children(recursive=True)):
        try:
            sizes.append(round(process.memory_info().rss / 1e6))
        except psutil.NoSuchProcess:
            continue
    return sizes


def answer(rng: random.Random, right: bool) -> tuple[str, str, str, bool]:
    """Return a question, its gold answer, a completion, and True if the completion is right."""
    kind = rng.choice(NUMBERS if rng.random() < 0.5 else OTHERS)
    gold, same, other = kind(rng)
    return "What is it?", gold, rf"So the answer is $\boxed{{{same if right else other}}}$.", right


def _integer(rng):
    a = rng.randint(1000, 99_999)
    return str(a), rng.choice([f"{a:,}", f"{a}.0", rf"\${a}", rf"{a}\text{{ cm}}"]), str(a + 1)


def _fraction(rng):
    p, q = rng.randint(1, 40), rng.choice([7, 11, 13, 17])
    p += p % q == 0
    return (
        rf"\frac{{{p}}}{{{q}}}",
        rng.choice([f"{p}/{q}", rf"\dfrac{{{p}}}{{{q}}}"]),
        f"{p}/{q + 2}",
    )


def _root(rng):
    a, b = rng.randint(2, 9), rng.choice([2, 3, 5, 6, 7])
    same = rng.choice([rf"\sqrt{{{a * a * b}}}", rf"\sqrt{{{b}}} \cdot {a}"])
    return rf"{a}\sqrt{{{b}}}", same, rf"{a + 1}\sqrt{{{b}}}"


def _root_over(rng):
    a, b, c = rng.randint(1, 9), rng.choice([2, 3, 5]), rng.randint(2, 9)
    same = rf"\frac{{{a}}}{{{c}}}+\frac{{\sqrt{{{b}}}}}{{{c}}}"
    return rf"\frac{{{a}+\sqrt{{{b}}}}}{{{c}}}", same, rf"\frac{{{a}-\sqrt{{{b}}}}}{{{c}}}"


def _interval(rng):
    a = rng.randint(-9, 0)
    b = a + rng.randint(1, 9)
    gold = rf"[{a},{b}) \cup ({b + 2},\infty)"
    return (
        gold,
        rf"({b + 2}, \infty) \cup \left[{a}, {b}\right)",
        rf"[{a},{b}] \cup ({b + 2},\infty)",
    )


def _quadratic(rng):
    a, b = rng.randint(1, 9), rng.randint(10, 19)
    same = rng.choice([f"(x+{a})(x+{b})", f"{a * b}+{a + b}x+x^2"])
    return f"x^2+{a + b}x+{a * b}", same, f"x^2+{a + b}x-{a * b}"


def _set(rng):
    a, b, c = rng.sample(range(-20, 20), 3)
    return rf"{a},{b},{c}", rf"\{{{c}, {a}, {b}\}}", rf"{a},{b},{c + 50}"


def _matrix(rng):
    a, b, c, d = (rng.randint(1, 9) for _ in range(4))
    gold = rf"\begin{{pmatrix}}{a}&{b}\\{c}&{d}\end{{pmatrix}}"
    same = rf"\begin{{bmatrix}} {a} & {b} \\ {c} & {2 * d}/2 \end{{bmatrix}}"
    return gold, same, gold.replace("&", "&-")


def _text(rng):
    name = rng.choice(["Evelyn", "odd", "even", "Tuesday", "no solution"])
    return rf"\text{{{name}}}", name, rf"\text{{not {name}}}"


def _point(rng):
    a, b, c = rng.randint(-9, 9), rng.randint(1, 9), rng.choice([7, 11])
    return rf"\left({a},\frac{{{b}}}{{{c}}}\right)", f"({a}, {b}/{c})", f"({b}/{c}, {a})"


def _pi(rng):
    a, b = rng.randint(1, 30), rng.choice([7, 11, 13])
    return rf"\frac{{{a}\pi}}{{{b}}}", rf"\frac{{{a}}}{{{b}}} \pi", rf"\frac{{{a}\pi}}{{{b + 2}}}"


def _power(rng):
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return f"{a}x^{b}y", f"y x^{{{b}}} {a}", f"{a}x^{b + 1}y"


def _line(rng):
    a, b = rng.randint(2, 9), rng.randint(1, 9)
    return f"y={a}x+{b}", f"y = {b} + {a}x", f"y={a}x-{b}"


def _complex(rng):
    a, b = rng.randint(1, 20), rng.randint(2, 20)
    return f"{a}-{b}i", f"-{b}i+{a}", f"{a}+{b}i"


NUMBERS = (_integer, _integer, _fraction)
OTHERS = (
    _root, _root_over, _interval, _quadratic, _set, _matrix, _text, _point, _pi, _power, _line,
    _complex,
)  # fmt: skip

if __name__ == "__main__":
    main()
