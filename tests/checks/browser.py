"""Chromium without a window, driven over the DevTools protocol.

The protocol's messages are JSON, ended by a zero byte, on two pipes that the browser inherits as 3 and 4
(--remote-debugging-pipe): no port listens, and no WebSocket library is needed. Why not Playwright or
Selenium: docs/decisions/055-the-report-without-a-library.md.

    browser (one process for all tests)
      └─ page (a tab: a width, a colour scheme, its errors)      evaluate, click, press, drag, wheel, picture
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT_S = 60.0
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
KEYS = {  # key -> code of the DOM, number of Windows
    "Enter": ("Enter", 13),
    "Escape": ("Escape", 27),
    "Tab": ("Tab", 9),
    "Backspace": ("Backspace", 8),
    "ArrowLeft": ("ArrowLeft", 37),
    "ArrowUp": ("ArrowUp", 38),
    "ArrowRight": ("ArrowRight", 39),
    "ArrowDown": ("ArrowDown", 40),
    "Home": ("Home", 36),
    "End": ("End", 35),
    "+": ("Equal", 187),
    "-": ("Minus", 189),
    "0": ("Digit0", 48),
}
Json = Any  # what a page answers


class BrowserFailed(AssertionError):
    """The browser refused a command, or a page threw an error."""


class Browser:
    """One browser process, with a profile of its own."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None, "chromium is not installed"
        command = [CHROMIUM, *ARGUMENTS, f"--user-data-dir={profile}", "about:blank"]
        (commands, self._to), (self._from, answers) = _pipe(), _pipe()
        self._process = os.posix_spawn(
            CHROMIUM,
            command,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, commands, 3),
                (os.POSIX_SPAWN_DUP2, answers, 4),
            ],
        )
        os.close(commands)
        os.close(answers)
        self._sent = 0
        self._read = b""
        self._arrived: deque[dict[str, Json]] = deque()
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.kill(self._process, signal.SIGTERM)
        os.close(self._to)
        os.close(self._from)
        os.waitpid(self._process, 0)

    def open(
        self, page: Path, width: int = 1400, *, height: int = 900, dark: bool = False, touch: bool = False
    ) -> "Page":
        """Open a file in a tab of its own, and return once it is loaded. Close it with the page's `close`."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = self._pages[session] = Page(self, target, session)
        for domain in ("Page", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        tab.resize(width, height)
        tab.emulate(dark=dark)
        if touch:
            tab.call("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})
        tab.call("Page.navigate", {"url": page.as_uri()})
        tab.wait_for_load()
        return tab

    def call(
        self, method: str, parameters: dict[str, Json] | None = None, session: str | None = None
    ) -> dict[str, Json]:
        """Send a command, and return its answer."""
        self._sent += 1
        message: dict[str, Json] = {"id": self._sent, "method": method, "params": parameters or {}}
        if session is not None:
            message["sessionId"] = session
        _write_all(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.next_message(method)
            if answer.get("id") == self._sent:
                if "error" in answer:
                    raise BrowserFailed(f"{method}: {answer['error']}")
                result: dict[str, Json] = answer["result"]
                return result

    def next_message(self, awaited: str) -> dict[str, Json]:
        """Return the next answer or event; events are told to their page, too."""
        until_s = time.monotonic() + TIMEOUT_S
        while not self._arrived:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not select.select([self._from], [], [], left_s)[0]:
                raise BrowserFailed(f"no answer to {awaited} within {TIMEOUT_S:.0f} s")
            part = os.read(self._from, 1 << 20)
            if not part:
                raise BrowserFailed(f"the browser ended during {awaited}")
            *whole, self._read = (self._read + part).split(b"\0")
            self._arrived += [json.loads(message) for message in whole]
        message = self._arrived.popleft()
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.hear(message["method"], message["params"])
        return message

    def forget(self, session: str) -> None:
        """Drop a page that is closed."""
        del self._pages[session]


class Page:
    """A tab. `errors`: what its console had of errors, and what its scripts threw."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self.errors: list[str] = []
        self._browser = browser
        self._target = target
        self._session = session
        self._is_loaded = False

    def __enter__(self) -> "Page":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(self, method: str, parameters: dict[str, Json] | None = None) -> dict[str, Json]:
        """Send a command of the protocol to this tab."""
        return self._browser.call(method, parameters, self._session)

    def hear(self, event: str, parameters: dict[str, Json]) -> None:
        """Note an event of the protocol."""
        if event == "Page.loadEventFired":
            self._is_loaded = True
        elif event == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert", "warning"):
            self.errors.append(" ".join(str(argument.get("value")) for argument in parameters["args"]))
        elif event == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])

    def wait_for_load(self) -> None:
        """Return once the page and its scripts are loaded."""
        while not self._is_loaded:
            self._browser.next_message("Page.loadEventFired")

    def reload(self) -> None:
        """Load the page again."""
        self._is_loaded = False
        self.call("Page.reload")
        self.wait_for_load()

    def resize(self, width: int, height: int = 900) -> None:
        """Give the tab another size, in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", size)

    def emulate(self, *, dark: bool = False, media: str = "") -> None:
        """Prefer a dark or a light page; `media`: "print", or the screen."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"media": media, "features": [scheme]})

    def evaluate(self, expression: str) -> Json:
        """Return what a JavaScript expression is, as JSON; a promise is awaited."""
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.call("Runtime.evaluate", asked)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserFailed(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """Return what is read in the first element that a CSS selector finds."""
        return " ".join(str(self.evaluate(f"{_first(selector)}.innerText")).split())

    def centre(self, selector: str) -> tuple[float, float]:
        """Return where the middle of an element is, once it is scrolled into view."""
        x, y = self.evaluate(
            f"(() => {{ const e = {_first(selector)}, into = {{block: 'center', behavior: 'instant'}};"
            "e.scrollIntoView(into); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        return x, y

    def point(self, x: float, y: float) -> None:
        """Move the mouse there."""
        self._mouse("mouseMoved", x, y)

    def click(self, selector: str) -> None:
        """Click on the middle of an element."""
        x, y = self.centre(selector)
        self._mouse("mousePressed", x, y, button="left", clickCount=1)
        self._mouse("mouseReleased", x, y, button="left", clickCount=1)

    def drag(self, start: tuple[float, float], stop: tuple[float, float], parts: int = 4) -> None:
        """Press the mouse at `start`, move it to `stop`, and let go."""
        self._mouse("mousePressed", *start, button="left", buttons=1, clickCount=1)
        for part in range(1, parts + 1):
            x, y = (a + (b - a) * part / parts for a, b in zip(start, stop, strict=True))
            self._mouse("mouseMoved", x, y, button="left", buttons=1)
        self._mouse("mouseReleased", *stop, button="left", clickCount=1)

    def wheel(self, x: float, y: float, down: float, *, ctrl: bool = False) -> None:
        """Turn the wheel by `down` pixels; `ctrl`: with that key, as a pinch of a touchpad is told."""
        self._mouse("mouseWheel", x, y, deltaX=0, deltaY=down, modifiers=2 if ctrl else 0)

    def touch(self, fingers: list[tuple[tuple[float, float], tuple[float, float]]], parts: int = 4) -> None:
        """Put fingers down, each at its first place, move them to their second ones, and lift them."""
        for part in range(parts + 1):
            points = [
                {
                    "x": a[0] + (b[0] - a[0]) * part / parts,
                    "y": a[1] + (b[1] - a[1]) * part / parts,
                    "id": number,
                }
                for number, (a, b) in enumerate(fingers)
            ]
            kind = "touchStart" if part == 0 else "touchMove"
            self.call("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
        self.call("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})

    def press(self, key: str) -> None:
        """Press one of KEYS in the element that has the focus."""
        code, number = KEYS[key]
        event = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        text = {"text": "\r" if key == "Enter" else key} if key == "Enter" or len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", {"type": "keyDown", **event, **text})
        self.call("Input.dispatchKeyEvent", {"type": "keyUp", **event})

    def write(self, text: str) -> None:
        """Type a text into the element that has the focus."""
        self.call("Input.insertText", {"text": text})

    def picture(self, path: Path, *, whole: bool = True) -> Path:
        """Write a PNG of the whole page, or of what is in view."""
        asked = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            asked["clip"] = {**size, "scale": 1}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", asked)["data"]))
        return path

    def pdf(self, path: Path) -> Path:
        """Print the page to a PDF of A4."""
        asked = {"paperWidth": 8.27, "paperHeight": 11.69, "printBackground": True}
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", asked)["data"]))
        return path

    def close(self) -> None:
        """Close the tab."""
        self._browser.call("Target.closeTarget", {"targetId": self._target})
        self._browser.forget(self._session)

    def _mouse(self, kind: str, x: float, y: float, **more: Json) -> None:
        self.call("Input.dispatchMouseEvent", {"type": kind, "x": x, "y": y, **more})


def _first(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)})"


def _pipe() -> tuple[int, int]:
    """Return a pipe's reading and writing end, at numbers that the browser does not use."""
    ends = os.pipe()
    reading, writing = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return reading, writing


def _write_all(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]
