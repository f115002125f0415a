"""The judge of answers: a right one, a wrong one, and one that never ends."""

from __future__ import annotations

import time
from pathlib import Path

from grpo_ustat.checkup.findings import Finding, failed, ok
from grpo_ustat.tasks.verifier import GRACE, JudgeError, Verdict, Verifier

DEADLINE, MEMORY_GB = 2.0, 2.0  # as in conf/dataset/math.yaml
RIGHT = (r"\boxed{\frac{1}{2}}", r"\boxed{0.5}")
WRONG = (r"\boxed{\frac{1}{2}}", r"\boxed{0.25}")
ENDLESS = (r"\boxed{7}", r"\boxed{9^{9^{9^9}}}")
SPARE = 3.0  # seconds beside the deadline, on a busy machine
FIX = (
    "pip install -c constraints.txt 'math-verify[antlr4-9-3]'; sets without dataset=math do "
    "without it"
)


def judge(_: Path) -> Finding:
    """Verdicts of the real judge in its own process, and the time of killing one."""
    verifier = Verifier(1, DEADLINE, MEMORY_GB)
    try:
        right, wrong = verifier.judge([RIGHT, WRONG])
        start = time.monotonic()
        endless, took = verifier.judge([ENDLESS])[0], time.monotonic() - start
    except JudgeError as error:
        return failed(str(error), FIX)
    finally:
        verifier.close()
    if (right, wrong) != (Verdict.RIGHT, Verdict.WRONG):
        return failed(f"a right answer was judged {right.value}, a wrong one {wrong.value}", FIX)
    if endless in (Verdict.RIGHT, Verdict.WRONG) or took > DEADLINE + GRACE + SPARE:
        return failed(
            f"an answer that never ends was judged {endless.value} after {took:.1f} s, the "
            f"deadline is {DEADLINE:g} s",
            "report it; do not train with dataset=math here",
        )
    return ok(f"right, wrong; an answer that never ends was stopped after {took:.1f} s")
