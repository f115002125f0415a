"""A real browser for tests: Chromium without a window, spoken to through pipes."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def missing() -> str | None:
    """Why there is no browser here, in words; installs Chromium where apt-get can."""
    with open(__file__) as this:
        fcntl.flock(this, fcntl.LOCK_EX)  # tests side by side install it once
        if _program():
            return None
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            return f"no {', '.join(PROGRAMS)}, and no root with apt-get to install one"
        options = dict(capture_output=True, text=True, timeout=600)
        options["env"] = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        wanted = ["install", "-qy", "--no-install-recommends", "chromium"]
        for words in (["update", "-q"], wanted):
            done = subprocess.run(["apt-get", *words], **options)
        return None if _program() else f"apt-get {' '.join(wanted)}: {done.stderr.strip()}"


def _program() -> str | None:
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Browser:
    """One tab.

    Attributes:
        events: what the browser reported since the page was opened, such as requests and dialogs.
    """

    def __init__(self) -> None:
        self._folder, self._count, self._rest = tempfile.mkdtemp(prefix="browser-"), 0, b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4.
        words = (
            f"exec {_program()} --headless --no-sandbox --disable-gpu --remote-debugging-pipe "
            f"--user-data-dir={self._folder} --no-first-run about:blank "
            f"3<&{theirs_in} 4>&{theirs_out}"
        )
        with open(Path(self._folder) / "log", "w") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", words], pass_fds=(theirs_in, theirs_out), stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip
        os.close(theirs_in), os.close(theirs_out)
        self._session = None
        targets = self.call("Target.getTargets")["targetInfos"]
        tab = next(one["targetId"] for one in targets if one["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *failure: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in), os.close(self._out)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the DevTools protocol and its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (found := self._next(60)).get("id") != self._count:
            self._noted(found)
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']}")
        return found["result"]

    def open(self, file: Path, width: int = 1280, dark: bool = False) -> None:
        """Load a page anew and wait until it is there."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        phone = dict(width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setDeviceMetricsOverride", **phone)
        self.events = []
        self.call("Page.navigate", url=f"file://{file}")
        self.settle("Page.loadEventFired")

    def settle(self, event: str | None = None, seconds: float = 0.5) -> None:
        """Take events in until one has come, then for a while."""
        end = time.monotonic() + 60
        while event and event not in [one["method"] for one in self.events]:
            self._noted(self._next(end - time.monotonic()))
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            try:
                self._noted(self._next(left))
            except TimeoutError:
                return

    def value(self, script: str) -> Any:
        """What an expression is within the page; a policy of the page does not bind it."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script[:80]}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def picture(self, file: Path) -> None:
        """The whole page as PNG."""
        options = dict(format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

    def requests(self) -> list[str]:
        """Addresses asked for since the page was opened, but for its own file."""
        sent = [one for one in self.events if one["method"] == "Network.requestWillBeSent"]
        urls = [one["params"]["request"]["url"] for one in sent]
        return [
            url for url in urls if not url.startswith(("file://", "data:image/svg+xml;base64,"))
        ]

    def dialogs(self) -> list[str]:
        """What pages asked in windows of their own."""
        opened = [one for one in self.events if one["method"] == "Page.javascriptDialogOpening"]
        return [one["params"]["message"] for one in opened]

    def _noted(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if event.get("method") == "Page.javascriptDialogOpening":
            message = {"id": 0, "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            message |= {"sessionId": self._session}
            os.write(self._out, json.dumps(message).encode() + b"\0")

    def _next(self, seconds: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            with selectors.DefaultSelector() as selector:
                selector.register(self._in, selectors.EVENT_READ)
                if not selector.select(max(0, seconds)):
                    raise TimeoutError(f"the browser said nothing in {seconds:.1f} s")
            read = os.read(self._in, 1 << 20)
            if not read:
                log = (Path(self._folder) / "log").read_text(errors="replace")
                raise RuntimeError(f"the browser has ended: {log[-2000:]}")
            self._rest += read
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)
