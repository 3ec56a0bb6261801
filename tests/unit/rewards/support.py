"""Batches for the reward runner, what it leaves on record, and a server that answers questions."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from trlx_like.rewards.runner import FAULTS_FILE, RewardRunner, Scores

GIVEN = {"samples": ["pa", "pbad", "pccc"], "prompts": ["p"] * 3, "outputs": ["a", "bad", "ccc"]}
RIGHT = [1.0, 3.0, 3.0]
MANY = {name: column * 2 for name, column in GIVEN.items()}

Runners = Callable[..., RewardRunner]


def scores_of(runner: RewardRunner, given: Mapping[str, Any] = GIVEN, **more: Any) -> Scores:
    return score(runner, given, [{} for _ in given["outputs"]], **more)


def score(runner: RewardRunner, given: Mapping[str, Any], metadata: Sequence[Mapping[str, Any]], **more: Any) -> Scores:
    return runner.result(runner.submit(given, metadata, **more))


def faults(folder: Path) -> list[dict[str, Any]]:
    file = folder / FAULTS_FILE
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


Reply = tuple[int, Any, dict[str, str]]  # status, body (text of the answer, or bytes as they are), headers


class Server:
    """Answers with what `reply` makes of a question's text; keeps the requests."""

    def __init__(self) -> None:
        self.reply: Callable[[str], str | Reply] = longer
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.pause = 0.0  # seconds before each part of an answer
        self.part = 2**40  # bytes
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append({"path": self.path, **body})
                server.headers.append(dict(self.headers))
                made = server.reply(body["messages"][0]["content"])
                status, text, headers = (200, made, {}) if isinstance(made, str) else made
                answer = {"choices": [{"message": {"role": "assistant", "content": text}}]}
                data = text if isinstance(text, bytes) else json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(data)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    for start in range(0, len(data), server.part):
                        time.sleep(server.pause)
                        self.wfile.write(data[start : start + server.part])
                except OSError:
                    pass  # whoever asked has given up

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


def answers_in(text: str) -> tuple[str, str]:
    found = re.search(r"Answer A:\n(.*)\n\nAnswer B:\n(.*)\n\nReply", text, re.DOTALL)
    assert found is not None
    return found[1], found[2]


def longer(text: str) -> str:
    a, b = answers_in(text)
    return "A" if len(a) > len(b) else "B"
