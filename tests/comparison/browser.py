"""A real browser for the tests of pages: Debian's chromium without a window, spoken to over a pipe.

Chromium reads commands of its DevTools protocol from file descriptor 3 and writes answers to 4, each a JSON object that
ends in a zero byte. That is all there is to it, so no package is needed.
"""

import base64
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any, Self

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
    "--disable-background-networking", "--disable-extensions", "--remote-debugging-pipe",
)  # fmt: skip
PATIENCE = 60.0  # seconds, for one answer of a browser on a busy machine


def chromium() -> str | None:
    """Where the browser is; None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page of one browser.

    Attributes:
        requests: every address that the page has asked for.
        complaints: what the console and the page's own errors said.
    """

    def __init__(self, program: str) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._folder = tempfile.mkdtemp(prefix="page-")
        self._number, self._buffer, self._session = 0, b"", ""
        theirs_in, self._write = os.pipe()
        self._read, theirs_out = os.pipe()
        silence = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, silence, out) for out in (0, 1, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, theirs_in, 3), (os.POSIX_SPAWN_DUP2, theirs_out, 4)]
        command = [program, *FLAGS, f"--user-data-dir={self._folder}", "about:blank"]
        # a group of its own, so that all of the browser's processes can be ended together
        self._process = os.posix_spawn(program, command, os.environ, file_actions=actions, setpgroup=0)
        for end in (theirs_in, theirs_out, silence):
            os.close(end)
        targets = self.send("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- the protocol -------------------------------------------------------------------------------------------------

    def send(self, method: str, **params: Any) -> Any:
        """Send one command and return its result; events that arrive meanwhile are noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self, waiting_for: str) -> Any:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(self._read, 2**20) if ready else b""
            assert piece, f"the browser has not answered {waiting_for}"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, params: Any) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"]["text"])
        elif event == "Log.entryAdded":
            self.complaints.append(params["entry"]["text"])
        elif event == "Runtime.consoleAPICalled":
            self.complaints.append(str([each.get("value") for each in params["args"]]))
        elif event == "Page.loadEventFired":
            self._loaded = True

    # --- what a reader does -------------------------------------------------------------------------------------------

    def open(
        self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False, media: str = "", js: bool = True
    ) -> None:
        """Load a page in a window of this width, as a reader with these settings would."""
        self.requests, self.complaints, self._loaded = [], [], False
        self.send("Emulation.setScriptExecutionDisabled", value=not js)
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", media=media, features=scheme)
        self.send("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._next("Page.navigate")

    def ask(self, expression: str) -> Any:
        """Return what an expression of JavaScript is on the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """Press and release a key."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            sent = {"text": text} if kind == "keyDown" and text else {}
            self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **sent)

    def click(self, x: float, y: float) -> None:
        """Click at a place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path | None = None) -> bytes:
        """Return the whole page as a PNG, and write it where a path is given."""
        found = base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"])
        if path is not None:
            path.write_bytes(found)
        return found

    def pdf(self) -> bytes:
        """Return the page as it is printed."""
        return base64.b64decode(self.send("Page.printToPDF", printBackground=False)["data"])
