"""Connection test for the Hugging Face hub.

If the hub does not answer, the run reads only the local cache, as with HF_HUB_OFFLINE=1. Without
this test, huggingface_hub would request each file six times, which takes more than a minute.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import cache

from grpo_ustat.distributed.ranks import is_main
from grpo_ustat.terminal.streams import single_line, tell

# Time limit for an answer, in seconds. The limit is enforced with a thread, because name resolution
# has no time limit of its own.
ANSWER_SECONDS = 8.0


@cache
def go_offline_if_unreachable() -> bool:
    """Switch to the local cache if the hub does not answer; return True after such a switch.

    The switch prints a warning and sets HF_HUB_OFFLINE=1 for this process and its children. Only
    the first call contacts the hub.
    """
    from huggingface_hub import constants, get_session, is_offline_mode

    if is_offline_mode():
        return False
    failures: list[str] = [f"no answer in {ANSWER_SECONDS:g} s"]

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
            failures.clear()
        except Exception as error:
            # The type of the error depends on the library that sends the request.
            failures[:] = [single_line(error) or type(error).__name__]

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if not failures:
        return False
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules and "HF_DATASETS_OFFLINE" not in os.environ:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    if is_main():
        tell(
            f"warning: the hub does not answer ({failures[0]}): only its local cache is read, as "
            "with HF_HUB_OFFLINE=1",
            file=sys.stderr,
        )
    return True
