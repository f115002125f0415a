"""`grpo-ustat doctor`: whether runs will work on this machine, and what to do if not."""

from __future__ import annotations

import faulthandler
from pathlib import Path

from grpo_ustat.cli.parser import VerbParser
from grpo_ustat.doctor.runner import CHECKS, show, show_json


def main() -> None:
    """Console entry; the exit code is 1 where a check failed, else 0."""
    names = [check.name for check in CHECKS]
    parser = VerbParser("doctor", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("outputs"), metavar="DIR",
        help="where runs are to be written: its disk and its locks are tried (default: outputs)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="for programs: one JSON object")
    parser.add_argument(
        "--only", nargs="+", metavar="CHECK", choices=names, help=f"some of: {', '.join(names)}"
    )
    options = parser.parse_args()
    checks = [check for check in CHECKS if options.only is None or check.name in options.only]
    faulthandler.enable()  # where a library kills the process, stderr says in which check
    failures = (show_json if options.json else show)(checks, options.output)
    raise SystemExit(int(failures > 0))


if __name__ == "__main__":
    main()
