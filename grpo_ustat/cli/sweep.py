"""`grpo-ustat sweep status DIR`: progress of the sweeps in a folder."""

from __future__ import annotations

import sys
from pathlib import Path

from grpo_ustat.cli.parser import VerbParser
from grpo_ustat.config.schema import ConfigError
from grpo_ustat.runs.status import details, status_table, sweeps_in
from grpo_ustat.terminal.console import Console
from grpo_ustat.terminal.streams import tell

EXAMPLES = {
    "status outputs/train": "all sweeps of a folder",
    "status outputs/train/sweep-NAME.json": "a single sweep",
}


def main() -> None:
    """Run the command; the exit code does not depend on the states of the runs."""
    parser = VerbParser("sweep", __doc__ or "", EXAMPLES)
    parser.add_argument(
        "status", choices=["status"], help="show a table of all runs in a folder's sweeps"
    )
    parser.add_argument(
        "place",
        type=Path,
        metavar="DIR",
        help="a folder of runs, such as outputs/train, or a sweep-*.json file",
    )
    place = parser.parse_args().place
    try:
        for sweep in sweeps_in(place):
            states = [point.state() for point in sweep.entries]
            Console().print(status_table(sweep, states))
            tell(*details(sweep, states), "")
    except ConfigError as error:
        tell(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
