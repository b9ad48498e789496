"""A headless Chromium, driven over two pipes by the DevTools protocol: no package and no port is needed for it."""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
END = b"\0"  # of a message


class BrowserError(Exception):
    """The browser is gone, too late, or a script in it failed."""


def chromium() -> str | None:
    """Return the path of Chromium, or None if it is not installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One tab. Use as a context manager."""

    def __init__(self, folder: Path, width: int = 1280, height: int = 800) -> None:
        """Start Chromium with its profile in `folder`.

        Raises:
            BrowserError: if Chromium is not installed.
        """
        program = chromium()
        if program is None:
            raise BrowserError(f"none of {', '.join(NAMES)} is here; install Debian's chromium.")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        options += ("--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={folder}")
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'  # where the protocol expects the pipes
        words = ["bash", "-c", shell, "bash", program, *options, f"--window-size={width},{height}", "about:blank"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(words, pass_fds=(theirs_in, theirs_out), stdout=quiet, stderr=quiet)
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._rest, self.events = 0, b"", list[dict[str, Any]]()
        self._session: str | None = None
        try:
            tab = next(each for each in self.ask("Target.getTargets")["targetInfos"] if each["type"] == "page")
            attached = self.ask("Target.attachToTarget", targetId=tab["targetId"], flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.ask(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return the answer. Events that arrive before it are kept.

        Raises:
            BrowserError: if the browser reports an error or does not answer.
        """
        self._number += 1
        session = {} if self._session is None else {"sessionId": self._session}
        message = {"id": self._number, "method": method, "params": params, **session}
        os.write(self._out, json.dumps(message).encode() + END)
        while True:
            found = self._message()
            if found.get("id") != self._number:
                self.events.append(found)
                continue
            if "error" in found:
                raise BrowserError(f"{method}: {found['error']['message']}")
            result: dict[str, Any] = found["result"]
            return result

    def open(self, url: str) -> None:
        """And waits until it is loaded. Raises BrowserError."""
        self.ask("Page.navigate", url=url)
        self.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def run(self, script: str) -> Any:
        """Return the value of an expression, awaited if it is a promise.

        Raises:
            BrowserError: if the expression throws.
        """
        said = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in said:
            raise BrowserError(json.dumps(said["exceptionDetails"].get("exception", said["exceptionDetails"]))[:500])
        return said["result"].get("value")

    def until(self, holds: str, seconds: float = 20.0) -> None:
        """Waits for an expression to be true. Raises BrowserError."""
        end_s = time.monotonic() + seconds
        while not self.run(f"Boolean({holds})"):
            if time.monotonic() > end_s:
                raise BrowserError(f"after {seconds:g} s this was not true: {holds}")
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.ask("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """One key, such as Enter, Escape, ArrowRight, Tab."""
        codes = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", **common)

    def point(self, x: float, y: float) -> None:
        """Moves the mouse there."""
        self.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def look(self, width: int, height: int, *, is_dark: bool = False) -> None:
        """A window of this size, in light or dark colours."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, file: Path) -> None:
        """Write a screenshot as PNG."""
        file.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))

    def _message(self, seconds: float = 30.0) -> dict[str, Any]:
        while END not in self._rest:
            if not select.select([self._in], [], [], seconds)[0]:
                raise BrowserError(f"the browser said nothing for {seconds:g} s.")
            piece = os.read(self._in, 2**16)
            if not piece:
                raise BrowserError("the browser has ended.")
            self._rest += piece
        message, _, self._rest = self._rest.partition(END)
        found: dict[str, Any] = json.loads(message)
        return found
