r"""Worker process of `grpo_ustat.tasks.verifier`, which judges LaTeX texts with math-verify.

The process is started with the path of this file, so that it does not import grpo_ustat, torch or
the run's main module. A fork of the process does the judging. If a pair kills the fork, or the fork
has judged its maximum number of pairs, the next fork takes over within milliseconds. The deadline
is a system alarm that ends the fork during any computation, even if the run has ended.

The judging fork is restricted, because a policy writes the texts that it parses. It cannot open a
socket, start a process or write a file. It can read only Python modules (some libraries import them
late), other files in Python's installation, and its own memory status.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import all_suffixes
from itertools import product
from multiprocessing.connection import Connection
from typing import Any, cast

READY = "ready"
STATUS_FILE = "/proc/self/status"
WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Prefixes of the names of Python's audit events that a judging fork refuses.
REFUSED_EVENTS = ("os.", "socket.", "subprocess.", "shutil.")
# Events with these prefixes that are allowed, because they are needed to check that the run is
# alive and to import modules.
PERMITTED_EVENTS = ("os.kill", "os.listdir", "os.scandir")
# Interval in seconds between checks that the run is still alive.
LOOK_SECONDS = 2.0
# If memory use exceeded this fraction of the limit, a verdict of "wrong" is not trusted.
TRUSTED_MEMORY_SHARE = 0.9
# Number of digits to which a difference is computed before it is treated as 0.
DIFFERENCE_DIGITS = 1000
# Math-verify can mistake only differences below this value for 0.
NEAR_DIFFERENCE = 1e-9
# The same limit if one of the values is a decimal.
NEAR_DECIMAL_DIFFERENCE = 1e-5
# A relative difference up to this value can be due to the rounding of a decimal.
ROUNDING_TOLERANCE = 1e-3
# Exit codes of a fork. After HANDED_OVER, the next fork takes over.
DONE, CRASHED, HANDED_OVER = 0, 1, 3
# Pairs of gold answer and answer that are judged once before forking.
WARM_UP_PAIRS = (
    (r"\frac{1}{2}", "0.5"), (r"\frac{\sqrt{3}}{2}", r"\sqrt{3}/2"), ("x^2-1", "(x-1)(x+1)"),
    ("[0,1)", r"(0,\infty)"), (r"\{1,2\}", r"2,1"), ("y=2x+1", "2x+1=y"), ("x<3", "3>x"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
)  # fmt: skip

Judge = Callable[[str, str], bool]


def main(handle: int, run: int, deadline: float, memory_bytes: int, tasks: int) -> None:
    """Judge the pairs that arrive on the pipe until the run closes the pipe or ends."""
    # Signals that request a stop are ignored here, because only the run responds to them.
    for name in ("INT", "TERM", "USR1", "USR2", "HUP"):
        signal.signal(signal.Signals[f"SIG{name}"], signal.SIG_IGN)
    # With the default handler, the alarm ends the process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    pipe = Connection(handle)
    try:
        judge = _judge()
        # Build the parser's tables before forking, so that all forks share them.
        for gold, answer in WARM_UP_PAIRS:
            judge(rf"\boxed{{{gold}}}", rf"\boxed{{{answer}}}")
    except Exception as error:
        return _say(pipe, f"{type(error).__name__}: {' '.join(str(error).split())}")
    memory_bytes = _limited(resource.RLIMIT_AS, memory_bytes)
    _limited(resource.RLIMIT_CORE, 0)
    _say(pipe, READY)
    # Byte that is shared with the forks. It is 1 while a pair is being judged.
    busy = mmap.mmap(-1, 1)
    ended = HANDED_OVER
    while ended == HANDED_OVER or busy[0]:
        if busy[0]:
            _say(pipe, "timeout" if ended == -signal.SIGALRM else "failure")
            busy[0] = 0
        ended = _forked(lambda: _serve(pipe, run, judge, busy, deadline, memory_bytes, tasks))


def _limited(what: int, most: int) -> int:
    """Limit this process's use of a resource, and return the limit.

    The limit is `most`, or the hard limit if that is lower. If the system does not support such a
    limit, none is set.
    """
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(what, (most, most))
    return most


def _say(pipe: Connection, word: str) -> None:
    pipe.send_bytes(json.dumps(word).encode())


def _forked(work: Callable[[], int]) -> int:
    """Do the work in a fork, and return the fork's exit code.

    If a signal ended the fork, the result is minus the number of the signal.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        code = work()
    except BaseException:
        code = CRASHED
    os._exit(code)


def _serve(
    pipe: Connection,
    run: int,
    judge: Judge,
    busy: mmap.mmap,
    deadline: float,
    memory_bytes: int,
    tasks: int,
) -> int:
    """Judge up to `tasks` pairs in a fork; return the exit code of the fork."""
    _guard()
    for _ in range(tasks):
        try:
            while not pipe.poll(LOOK_SECONDS):
                os.kill(run, 0)
            gold, answer = json.loads(pipe.recv_bytes())
        except (EOFError, ProcessLookupError):
            # The run has closed the pipe or has ended.
            return DONE
        busy[0] = 1
        signal.setitimer(signal.ITIMER_REAL, deadline)
        verdict = _verdict(judge, gold, answer, memory_bytes)
        signal.setitimer(signal.ITIMER_REAL, 0)
        busy[0] = 0
        _say(pipe, verdict)
        if verdict == "failure":
            break
    return HANDED_OVER


def _guard() -> None:
    """Restrict this process: afterwards, it can only read Python modules and packages.

    It cannot write files, use the network or start processes. The restriction is an audit hook,
    which cannot be removed. The hook sees actions of Python code, but not of compiled code.
    """
    sys.dont_write_bytecode = True
    packages = tuple(os.path.join(os.path.realpath(x), "") for x in (sys.prefix, sys.base_prefix))
    modules = tuple(all_suffixes())

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        """Raise an error unless the event is permitted, such as reading a module or package."""
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, int) or path == STATUS_FILE:
                return
            place = os.path.realpath(os.fsdecode(path))
            if not flags & WRITING_FLAGS and (
                place.startswith(packages) or place.endswith(modules)
            ):
                return
        elif event in PERMITTED_EVENTS or not event.startswith(REFUSED_EVENTS):
            return
        raise PermissionError(f"{event}: a judge of answers must not open files or use the network")

    sys.addaudithook(watch)


def _verdict(judge: Judge, gold: str, answer: str, memory_bytes: int) -> str:
    try:
        right = judge(gold, answer)
    except Exception:
        return "failure"
    if not right and _peak_bytes() > TRUSTED_MEMORY_SHARE * memory_bytes:
        # The verdict may be due to a MemoryError, which the libraries suppress in some places.
        return "failure"
    return "right" if right else "wrong"


def _peak_bytes() -> int:
    """Return the peak address space of this process in bytes.

    If the system does not report the peak address space, return the peak resident memory.
    """
    if not os.path.exists(STATUS_FILE):
        # Unit of `ru_maxrss`, in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open(STATUS_FILE) as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmPeak:"))


def _judge() -> Judge:
    """Return the function `judge(gold, answer)`, which uses math-verify without its time limits.

    Only LaTeX is parsed, because sympy's `parse_expr` would evaluate plain expressions as code.
    Units are not removed, because math-verify would treat the last letter of `3t` as a unit.
    """
    logging.disable(logging.CRITICAL)
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    reading = NormalizationConfig(malformed_operators=True, nits=True, units=False, boxed="all")
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=reading)]
    settings = {"allow_set_relation_comp": True, "timeout_seconds": None, "raise_on_error": True}

    def read(text: str) -> list:
        """Parse a text with math-verify."""
        # parsing_timeout=None disables the alarm; math-verify's type annotation omits None.
        options: dict[str, Any] = {"parsing_timeout": None, "raise_on_error": True}
        return parse(text, config, "no_fallback", **options)

    def judge(gold: str, answer: str) -> bool:
        """Return True if any parse of the answer equals any parse of the gold answer."""
        failure = None
        for pair in product(read(gold), read(answer)):
            try:
                pair = _agreeing(*pair)
                if verify(*pair, **settings) and not _differ(*pair):
                    return True
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure
        return False

    return judge


def _agreeing(gold: Any, answer: Any) -> tuple[Any, Any]:
    """Return the gold answer and the answer, with the same symbol for equal letters.

    Math-verify can represent the same letter by a real symbol in one answer and by a general symbol
    in the other. The letter i is replaced with the imaginary unit if this makes the gold answer
    complex.
    """
    import sympy

    letters = getattr(gold, "free_symbols", set()) | getattr(answer, "free_symbols", set())
    names = [letter.name for letter in letters]
    replacements = {x: sympy.Symbol(x.name) for x in letters if names.count(x.name) > 1}
    unit = {letter: sympy.I for letter in letters if letter.name == "i"}
    if unit and _is_complex(gold, unit):
        replacements |= unit
    return (gold.subs(replacements), answer.subs(replacements)) if replacements else (gold, answer)


def _is_complex(value: Any, unit: dict[Any, Any]) -> bool:
    """Return True if a value or one of its entries is complex when i is the imaginary unit.

    If the value contains a power of i, a sum or a product, i is taken as a variable or an index,
    and the result is False.
    """
    import sympy

    if isinstance(value, sympy.FiniteSet | sympy.Tuple | sympy.MatrixBase):
        return any(_is_complex(entry, unit) for entry in _entries(value))
    try:
        powers = any(power.base in unit for power in sympy.expand(value).atoms(sympy.Pow))
        is_real = abs(complex(value.subs(unit)).imag) < NEAR_DIFFERENCE
    except (TypeError, ValueError, AttributeError):
        return False
    return not (is_real or powers or value.has(sympy.Sum, sympy.Product))


def _differ(gold: Any, answer: Any) -> bool:
    """Return True if two values are certainly different although math-verify considers them equal.

    Math-verify ignores differences below 2^-54, and it rounds a decimal to six decimal places.
    """
    import sympy

    unordered = (sympy.FiniteSet, sympy.And, sympy.Or)
    for kind in (sympy.Tuple, sympy.MatrixBase, sympy.Interval, *unordered):
        if isinstance(gold, kind) and isinstance(answer, kind):
            golds, answers = _entries(gold), _entries(answer)
            if kind not in unordered:
                return any(map(_differ, golds, answers))
            pairs = [
                [(gold_entry, answer_entry) for answer_entry in answers] for gold_entry in golds
            ]
            return any(
                any(_differ(*pair) for pair in of_one) and all(_distance(*pair) for pair in of_one)
                for of_one in pairs
            )
    distance = _distance(gold, answer)
    if distance is None:
        return False
    if gold.has(sympy.Float) or answer.has(sympy.Float):
        size = abs(_at_a_point(gold, answer)[0].evalf(5))
        return bool(ROUNDING_TOLERANCE * size < distance < NEAR_DECIMAL_DIFFERENCE)
    return bool(0 < distance < NEAR_DIFFERENCE)


def _distance(gold: Any, answer: Any) -> Any:
    """Return the absolute difference of two values, with numbers substituted for letters.

    The result is 0 if no difference is found to DIFFERENCE_DIGITS digits, and None if the
    difference is not a finite number.
    """
    import sympy

    try:
        first, second = _at_a_point(gold, answer)
        distance = abs((first - second).evalf(5, maxn=DIFFERENCE_DIGITS, strict=True))
    except sympy.PrecisionExhausted:
        return 0
    except (TypeError, AttributeError, ValueError):
        return None
    return distance if distance.is_number and distance.is_finite else None


def _at_a_point(*values: Any) -> list[Any]:
    """Return the values with numbers substituted for their letters.

    An inequality becomes its larger side minus its smaller side. An equation with a single letter
    on one side becomes its other side. Any other equation becomes its left side minus its right
    side.
    """
    import sympy

    def value(x: Any) -> Any:
        """Convert an equation or inequality to an expression; return other values unchanged."""
        if isinstance(x, sympy.Eq | sympy.Ne):
            left, right = cast(Any, x.lhs), cast(Any, x.rhs)
            if left.is_Symbol or right.is_Symbol:
                return left if right.is_Symbol else right
            return left - right
        return x.gts - x.lts if getattr(x, "is_Relational", False) else x

    values = tuple(map(value, values))
    letters = sorted(set().union(*(x.free_symbols for x in values)), key=str)
    point = {letter: sympy.Rational(13 + 4 * i, 11) for i, letter in enumerate(letters)}
    return [x.doit().subs(point) for x in values]


def _entries(value: Any) -> list[Any]:
    """Return the entries of a tuple, set or matrix (row by row), or the ends of an interval."""
    import sympy

    if isinstance(value, sympy.Interval):
        return [value.start, value.end]
    return list(value.flat()) if isinstance(value, sympy.MatrixBase) else list(value.args)


if __name__ == "__main__":
    handle, run, deadline, memory_bytes, tasks = sys.argv[1:]
    main(int(handle), int(run), float(deadline), int(memory_bytes), int(tasks))
