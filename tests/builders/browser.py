"""A headless Chromium, driven over a pipe by its DevTools protocol: clicks, keys, pictures, and what went wrong.

The browser reads commands from its descriptor 3 and writes answers and events to 4: JSON, ended by a zero byte.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIETLY = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
TROUBLE = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")

Json = dict[str, Any]  # as the protocol has it


class Browser:
    """A context: one browser, with one page at a time. `troubles`: exceptions and what the console was told."""

    def __enter__(self) -> "Browser":
        assert CHROMIUM is not None, "chromium is installed"
        self._profile = tempfile.TemporaryDirectory(prefix="partc-browser-")
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        # The browser finds its ends at 3 and 4, whatever their numbers are here: a shell puts them there.
        command = [CHROMIUM, *QUIETLY, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest, self._number = b"", 0
        self.troubles: list[str] = []
        target = self._call("Target.createTarget", {"url": "about:blank"}, session=None)["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True}, session=None)
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def open(
        self, page: Path, width: int = 1400, height: int = 900, dark: bool = False, at: str = ""
    ) -> None:
        """Open a page, `at` its fragment, and wait until it is loaded. Forgets the troubles before."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", {"features": [scheme]})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", size)
        self._call("Page.navigate", {"url": "about:blank"})
        self.troubles.clear()
        self._call("Page.navigate", {"url": page.as_uri() + at})
        while not self.run("document.readyState === 'complete' && location.protocol === 'file:'"):
            pass

    def run(self, script: str) -> Any:
        """Return what an expression evaluates to, as JSON has it."""
        answer = self._call(
            "Runtime.evaluate", {"expression": script, "returnByValue": True, "awaitPromise": True}
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def middle(self, selector: str) -> tuple[float, float]:
        """Return where the first element that a selector finds is on the screen, brought into view."""
        found = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        assert found is not None, f"{selector} is on the page"
        return found[0], found[1]

    def click(self, selector: str) -> None:
        """Press the mouse on an element."""
        x, y = self.middle(selector)
        self.mouse("mousePressed", x, y)
        self.mouse("mouseReleased", x, y)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send an event of the left button, or of the wheel."""
        press = {"type": kind, "x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1}
        self._call("Input.dispatchMouseEvent", press | more)

    def type(self, text: str) -> None:
        """Type text where the focus is."""
        self._call("Input.insertText", {"text": text})

    def key(self, name: str, code: int = 0) -> None:
        """Press a key, such as Enter (13) or ArrowDown (40)."""
        pressed = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        if name == "Enter":
            pressed["text"] = "\r"
        if len(name) == 1:
            pressed["text"] = name
        self._call("Input.dispatchKeyEvent", {"type": "keyDown", **pressed})
        self._call("Input.dispatchKeyEvent", {"type": "keyUp", **pressed})

    def picture(self, path: Path, whole: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        answer = self._call("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, parameters: Json | None = None, session: str | None = "") -> Json:
        self._number += 1
        message: Json = {"id": self._number, "method": method, "params": parameters or {}}
        if session == "":
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer.get("result", {})
            if answer.get("method") in TROUBLE:
                self.troubles.append(json.dumps(answer["params"])[:600])

    def _receive(self) -> Json:
        while b"\0" not in self._rest:
            data = os.read(self._from, 1 << 16)
            assert data, "the browser is there"
            self._rest += data
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)
