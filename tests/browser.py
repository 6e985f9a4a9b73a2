"""A headless Chromium for tests, spoken to in its DevTools protocol over two pipes; no package is needed for it."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--remote-debugging-pipe")


def need_browser() -> str:
    """The browser's path; skips the test where there is none, fails it with REQUIRE_BROWSER_TESTS=1."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        say = pytest.fail if os.environ.get("REQUIRE_BROWSER_TESTS") == "1" else pytest.skip
        say(f"no browser is installed (one of {', '.join(NAMES)}; on Debian: apt-get install chromium)")
    return found


class Browser:
    """One page of a browser.

    with Browser(tmp_path) as page:
        page.open(path, width=390)
        page.run("document.title")
    """

    def __init__(self, profile: Path):
        read_end, self.to_browser = os.pipe()
        self.from_browser, write_end = os.pipe()
        command = [need_browser(), *FLAGS, f"--user-data-dir={profile}"]
        # The browser reads from descriptor 3 and writes to 4.
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{read_end} 4>&{write_end}', "bash", *command],
            pass_fds=(read_end, write_end), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_end)
        os.close(write_end)
        self.buffer, self.number, self.session, self.events = b"", 0, None, []

    def __enter__(self) -> "Browser":
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.to_browser)
        os.close(self.from_browser)

    def receive(self) -> dict:
        """The browser's next message."""
        while b"\0" not in self.buffer:
            block = os.read(self.from_browser, 1 << 16)
            assert block, "the browser has ended"
            self.buffer += block
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def send(self, method: str, **parameters) -> dict:
        """The result of a method of the protocol; events on the way are kept in `events`."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while (answer := self.receive()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path: Path, width: int = 1400, language: str = "en-US") -> None:
        """Loads a file at a width in CSS pixels, for a reader of that language, and waits until it is there."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
        )
        agent = self.run("navigator.userAgent")
        self.send("Emulation.setUserAgentOverride", userAgent=agent, acceptLanguage=language)
        self.send("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.receive())
        self.events = [event for event in self.events if event.get("method") != "Page.loadEventFired"]

    def run(self, expression: str):
        """The value of a JavaScript expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")
