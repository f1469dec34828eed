"""A headless Chromium, spoken to by the DevTools protocol through a pipe.

https://chromedevtools.github.io/devtools-protocol/; messages are JSON, each ended by a zero byte.
"""

import base64
import json
import os
import re
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)
PATIENCE_S = 60.0


def find_chromium() -> str | None:
    """Return the program, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """One page of a browser; what it says while it loads is kept."""

    def __init__(self, write: int, read: int) -> None:
        self.write, self.read = write, read
        self.buffer = b""
        self.count = 0
        self.session = ""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write, json.dumps(message).encode() + b"\0")
        while True:
            said = self.receive()
            if said.get("id") == self.count:
                assert "error" not in said, (method, said["error"])
                return said["result"]
            self.events.append(said)

    def receive(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read], [], [], PATIENCE_S)
            assert ready, "Chromium says nothing"
            part = os.read(self.read, 1 << 20)
            assert part, "Chromium ended"
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def start(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, width: int = 1440, height: int = 900, scheme: str = "light") -> None:
        """Load a file in a window of a size and a colour scheme, and wait until it is there."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not any(each.get("method") == "Page.loadEventFired" for each in self.events):
            self.events.append(self.receive())
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def evaluate(self, expression: str) -> Any:
        """Return the JSON value of an expression; a promise is waited for."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key, e.g. Tab or Enter."""
        codes = {"Tab": 9, "Enter": 13}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text)

    def complaints(self) -> list[str]:
        """Return what the console shows and what the page threw."""
        said = [
            each
            for each in self.events
            if each.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        ]
        return [json.dumps(each["params"])[:500] for each in said]

    def requests(self) -> list[str]:
        """Return the addresses that were asked for."""
        return [
            each["params"]["request"]["url"]
            for each in self.events
            if each.get("method") == "Network.requestWillBeSent"
        ]

    def printed_pages(self) -> int:
        """Return the number of pages on paper (A4)."""
        data = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"]
        return len(re.findall(rb"/Type\s*/Page\b", base64.b64decode(data)))


@contextmanager
def chromium(profile: Path) -> Iterator[Chromium]:
    """Run a browser that keeps its files in a directory, and end it."""
    program = find_chromium()
    assert program is not None
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    # The browser reads descriptor 3 and writes 4; a shell moves ours there.
    moved = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
    command = ["bash", "-c", moved, program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    log = (profile.parent / f"{profile.name}.log").open("wb")
    with log:
        process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=log, stderr=log, start_new_session=True
        )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        browser = Chromium(ours_out, ours_in)
        browser.start()
        yield browser
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours_out)
        os.close(ours_in)
