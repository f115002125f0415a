"""Whether a server answers, in a second or two whatever the network does."""

from __future__ import annotations

import os
import socket
import threading
from urllib.parse import urlsplit

SECONDS = 2.0


def reach(url: str, seconds: float = SECONDS) -> str | None:
    """Why no connection to a server, or to the proxy before it, is there; None: it is.

    Looking up a name knows no deadline, so a thread that is not waited for does it.
    """
    proxy = os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy")
    parts = urlsplit(proxy or url)
    port = parts.port or {"http": 80}.get(parts.scheme, 443)
    found: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((parts.hostname, port), timeout=seconds).close()
            found.append(None)
        except OSError as error:
            found.append(error.strerror or str(error) or type(error).__name__)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds + 0.5)
    name = f"{parts.hostname}:{port}"
    why = found[0] if found else f"no answer in {seconds:g} s"
    return None if why is None else f"{name} cannot be reached ({why})"
