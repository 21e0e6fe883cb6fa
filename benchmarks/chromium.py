"""Chromium without a window, driven through ChromeDriver."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_OPTIONS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]


class Browser:
    """One tab."""

    def __init__(self, address: str) -> None:
        self._address = address
        asked = {"goog:chromeOptions": {"args": _OPTIONS}, "goog:loggingPrefs": {"browser": "ALL"}}
        found = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": asked}})
        self._session = f"/session/{found['sessionId']}"

    def _ask(self, method: str, path: str, content: Any = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self._address}{path}", data, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Open a file or an address in a window of a size [pixels]."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._command("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", {"features": [scheme]})
        address = page.resolve().as_uri() if isinstance(page, Path) else page
        self._ask("POST", f"{self._session}/url", {"url": address})

    def _command(self, name: str, parameters: Any) -> Any:
        path = f"{self._session}/goog/cdp/execute"
        return self._ask("POST", path, {"cmd": name, "params": parameters})

    def run(self, script: str) -> Any:
        """Return what a script returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def wait(self, script: str, seconds: float = 60) -> Any:
        """Return what a script returns, as soon as that counts as true."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"still false: {script}"
            time.sleep(0.05)
        return found

    def mouse(self, kind: str, x: float, y: float, button: str = "left") -> None:
        """Press, move or release a button, left or right, at a place of the window [pixels]."""
        name = {"press": "mousePressed", "move": "mouseMoved", "release": "mouseReleased"}[kind]
        held = {"button": button, "buttons": {"left": 1, "right": 2}[button], "clickCount": 1}
        self._command("Input.dispatchMouseEvent", {"type": name, "x": x, "y": y, **held})

    def complaints(self) -> list[str]:
        """Return what the console holds: errors of scripts, refused addresses."""
        return [one["message"] for one in self._ask("POST", f"{self._session}/se/log", {"type": "browser"})]

    def picture(self) -> bytes:
        """Return what is seen, as PNG."""
        return base64.b64decode(self._ask("GET", f"{self._session}/screenshot"))

    def close(self) -> None:
        self._ask("DELETE", self._session)


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser.

    Raises:
        FileNotFoundError: If Chromium or ChromeDriver is missing.
    """
    driver = shutil.which("chromedriver")
    if driver is None or not (shutil.which("chromium") or shutil.which("google-chrome")):
        raise FileNotFoundError("chromium or chromedriver is missing")
    with subprocess.Popen([driver, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            port = next(found[1] for line in lines if (found := re.search(r"on port (\d+)\.", line)))
            tab = Browser(f"http://localhost:{port}")
            try:
                yield tab
            finally:
                tab.close()
        finally:
            process.terminate()
