"""Debian's chromium without a window, driven through its pipe: what a page asks for, logs, and cuts off."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nightly

CUT_OFF = """
(() => {
  const found = [], wide = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > wide) found.push('the page is wider than its window');
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, text = node.textContent.trim();
    if (!text) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const svg = node.parentElement.closest('svg');
    const box = svg ? svg.getBoundingClientRect() : {left: 0, right: wide, top: -1e9, bottom: 1e9};
    for (const one of range.getClientRects())
      if (one.left < box.left - 1 || one.right > box.right + 1 || one.top < box.top - 1 || one.bottom > box.bottom + 1)
        found.push(text.slice(0, 60));
    for (let up = node.parentElement; up && up !== document.body; up = up.parentElement)
      if (getComputedStyle(up).overflowX !== 'visible' && up.scrollWidth > up.clientWidth + 1) found.push(text.slice(0, 60));
  }
  return found;
})()
"""


class Browser:
    """One page in one process."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, os.fdopen(answers, "rb", closefd=False)
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found
            self.events.append(answer)

    def open(self, page: Path | str, *, width: int, dark: bool = False) -> None:
        """Show a file, or a URL, whole."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self, *, height: int, width: int) -> bytes:
        """A PNG of the top of the page."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(shot["data"])

    def requests(self) -> list[str]:
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Errors of the page, and whatever it logs."""
        noisy = (
            "Log.entryAdded",
            "Runtime.exceptionThrown",
            "Runtime.consoleAPICalled",
            "Page.javascriptDialogOpening",
        )
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in noisy]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = self._answers.read1()
            assert more, "chromium ended"
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """`profile`: an empty directory of its own."""
    program = shutil.which("chromium")
    nightly.needs("chromium", there=program is not None)
    to_child, commands = os.pipe()
    answers, from_child = os.pipe()
    words = [str(program), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    words += [
        "--hide-scrollbars",
        "--disable-background-networking",
        f"--user-data-dir={profile}",
        "--remote-debugging-pipe",
    ]
    # It reads from descriptor 3 and writes to 4.
    shell = ["bash", "-c", f'exec "$@" 3<&{to_child} 4>&{from_child}', "chromium", *words]
    process = subprocess.Popen(
        shell, pass_fds=(to_child, from_child), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(to_child)
    os.close(from_child)
    try:
        yield Browser(commands, answers)
    finally:
        process.terminate()
        process.wait()
        os.close(commands)
        os.close(answers)
