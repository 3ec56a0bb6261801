"""A Chromium that tests can drive, if the machine has one: over a pipe, by the protocol of its developer tools."""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts.browser import MISSING, find_chromium

CHROMIUM = find_chromium()
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--window-size=1300,900", "--remote-debugging-pipe"),
)
SECONDS = 180  # without a word from the browser


class Tab:
    """A page in a browser. What its script or its policy complains about is an error of the test."""

    def __init__(self, read: Any, write: Any) -> None:
        self._read, self._write = read, write
        self._sent = 0
        self._session: dict[str, str] = {}
        self._buffer = b""
        self.complaints: list[str] = []
        self.loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params, **self._session}
        self._write.write(json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._sent:
            pass
        assert "error" not in answer, answer
        return dict(answer["result"])

    def open(self, page: Path) -> None:
        """Loads a page and waits until its charts are drawn."""
        self.loaded, self.complaints = False, []
        self.call("Page.navigate", url=page.as_uri())
        while not self.loaded:
            self._receive()
        self.run("await frame()")

    def run(self, script: str) -> Any:
        """What a script returns: the body of an async function that may call `await frame()` and `all(selector)`."""
        expression = f"""(async () => {{
          const frame = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
          const all = (what, within = document) => [...within.querySelectorAll(what)];
          {script}
        }})()"""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        assert not self.complaints, self.complaints
        return answer["result"].get("value")

    @property
    def html(self) -> str:
        return str(self.run("return document.documentElement.outerHTML"))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], SECONDS)
            part = os.read(self._read, 1 << 16) if ready else b""
            assert part, "the browser is gone" if ready else f"the browser did not answer for {SECONDS} seconds"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        event = message.get("method")
        self.loaded = self.loaded or event == "Page.loadEventFired"
        if event in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.complaints.append(json.dumps(message["params"]))
        return message


@contextmanager
def open_browser(profile: Path) -> Iterator[Tab]:
    """A browser with a fresh profile and one tab."""
    (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
    # It reads from 3 and writes to 4, which must not be among the ends that are given to it.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read, from_write)]
    shell = ["bash", "-c", f'exec "$@" 3<&{ends[0]} 4>&{ends[1]} 2>/dev/null', "bash"]
    process = subprocess.Popen([*shell, str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}"], pass_fds=ends)
    for end in (to_read, from_write, *ends):
        os.close(end)
    try:
        with os.fdopen(to_write, "wb", buffering=0) as write:
            yield Tab(from_read, write)
    finally:
        process.terminate()
        process.wait(timeout=60)
        os.close(from_read)
