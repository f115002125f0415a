"""One check in a process of its own: `python -m grpo_ustat.checkup MODULE:FUNCTION FOLDER LIMIT`.

Its last line on standard output is the finding.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path


def main() -> None:
    """Run the check; ends by an alarm of the system where nobody is left to end it."""
    target, folder, limit = sys.argv[1:]
    signal.alarm(int(float(limit)) + 5)
    module, _, function = target.partition(":")
    found = getattr(importlib.import_module(module), function)(Path(folder))
    print("\n" + json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
