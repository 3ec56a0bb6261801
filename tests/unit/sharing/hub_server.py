"""A small Hugging Face Hub on loopback: the routes by which huggingface_hub makes a repository and uploads a folder."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class Hub(ThreadingHTTPServer):
    """Attributes: made, the body of each creation; files, by repository and path; fails, uploads that it refuses."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Routes)
        self.made: list[dict[str, Any]] = []
        self.objects: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}
        self.uploads = 0
        self.fails = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Routes(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub, path = self.server, self.path.partition("?")[0]
        if path == "/api/repos/create":
            hub.made.append(json.loads(body))
            self.answer({"url": f"{hub.url}/{'/'.join(filter(None, map(hub.made[-1].get, ('organization', 'name'))))}"})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            modes = [
                {"path": file["path"], "shouldIgnore": False}
                | {"uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular"}
                for file in json.loads(body)["files"]
            ]
            self.answer({"files": modes})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                {"oid": one["oid"], "size": one["size"]}
                | (
                    {}
                    if one["oid"] in hub.objects
                    else {"actions": {"upload": {"href": f"{hub.url}/objects/{one['oid']}"}}}
                )
                for one in json.loads(body)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.objects[value["oid"]]
            self.answer(
                {
                    "commitUrl": f"{hub.url}{path.removeprefix('/api/models').partition('/commit/')[0]}/commit/1",
                    "commitOid": "1",
                    "pullRequestUrl": None,
                }
            )
        else:
            self.answer({"error": path}, 404)

    def do_PUT(self) -> None:
        body, hub = self.rfile.read(int(self.headers["Content-Length"])), self.server
        hub.uploads += 1
        if hub.uploads > 1 and hub.fails:
            hub.fails -= 1
            self.answer({"error": "full"}, 403)
            return
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == oid
        hub.objects[oid] = body
        self.answer({})

    def answer(self, value: Any, code: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve a hub that huggingface_hub takes for the hub."""
    from huggingface_hub import constants

    hub = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 34)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
