"""`python -m grpo_ustat.doctor`: whether runs will work on this machine, and what to do if not."""

from __future__ import annotations

import argparse
from pathlib import Path

from grpo_ustat.checkup.catalogue import CHECKS, chosen
from grpo_ustat.checkup.report import as_json, show


def main() -> None:
    """Console entry; the exit code is 1 where a check failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m grpo_ustat.doctor", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("outputs"), metavar="DIR",
        help="where runs are to be written: its disk and its locks are tried (default: outputs)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")
    parser.add_argument(
        "--only", nargs="+", metavar="CHECK", choices=[check.name for check in CHECKS],
        help=f"some of: {', '.join(check.name for check in CHECKS)}",
    )  # fmt: skip
    asked = parser.parse_args()
    failed = (as_json if asked.json else show)(chosen(asked.only), asked.output)
    raise SystemExit(int(failed > 0))


if __name__ == "__main__":
    main()
