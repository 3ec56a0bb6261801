"""A server on loopback with a real small model of transformers behind the routes of vLLM, which can be made to fail."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel


class VLLMServer:
    """Answers as vLLM 0.32: `/inference/v1/generate`, and the routes with which weights are replaced.

    fault: "" or what goes wrong from now on: "stalled", "stale" (updates are accepted and not made), "wrong layer" (one
    keeps its weights), "wrong log-probabilities" (those of temperature 1), "older vLLM" (it says no versions).
    """

    def __init__(self, lm: PreTrainedModel, port: int = 0) -> None:
        self.start, self.lm = lm, copy.deepcopy(lm).eval()
        self.fault, self.version, self.paused = "", "default", False
        self.routes: Counter[str] = Counter()
        self.lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                route = urlsplit(self.path).path
                try:
                    with server.lock:
                        status, answer = 200, server.answer(route, body)
                except Exception as error:
                    status, answer = 400, {"error": str(error)}
                data = json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    pass  # whoever asked has given up

            def log_message(self, *_: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_port
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def kill(self) -> None:
        """Refuse connections from now on."""
        self.http.shutdown()
        self.http.server_close()

    def restarted(self) -> VLLMServer:
        """A new server at the same address, with the weights of the start."""
        return VLLMServer(self.start, self.port)

    def answer(self, route: str, body: dict[str, Any]) -> Any:
        self.routes[route] += 1
        if self.fault == "stalled":
            time.sleep(2)
        if route == "/inference/v1/generate":
            return self.completion(body)
        if route in ("/pause", "/resume"):
            self.paused = route == "/pause"
        elif self.fault == "stale":
            return {}
        elif route == "/collective_rpc":
            assert body["method"] == "reload_weights" and self.paused
            self.load(Path(body["kwargs"]["weights_path"]))
        elif route == "/update_weight_version":
            self.version = body["new_version"]
        else:
            assert route == "/reset_prefix_cache", route
        return {}

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        held = dict(self.lm.named_parameters(remove_duplicate=False))
        for file in sorted(folder.glob("*.safetensors")):
            sent = load_file(file)
            for name in list(held):
                if name in sent:
                    weight = held.pop(name)
                    if self.fault != "wrong layer" or "h.1.attn" not in name:
                        weight.copy_(sent[name])
        assert not held, f"not sent: {sorted(held)}"

    @torch.no_grad()
    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        assert not self.paused
        given, params = list(body["token_ids"]), body["sampling_params"]
        random = torch.Generator().manual_seed(params["seed"])
        ids: list[int] = []
        content = []
        while len(ids) < params["max_tokens"]:
            logits = self.lm(torch.tensor([given + ids])).logits[0, -1]
            distribution = (logits / (params["temperature"] or 1.0)).softmax(dim=-1)
            greedy = params["temperature"] == 0
            token = int(distribution.argmax()) if greedy else int(distribution.multinomial(1, generator=random))
            told = logits.softmax(dim=-1) if self.fault == "wrong log-probabilities" else distribution
            ids.append(token)
            content.append({"token_id": token, "logprob": float(told[token].log()), "top_logprobs": []})
            if token in params["stop_token_ids"]:
                break
        spans = None if self.fault == "older vLLM" else [{"version": self.version, "start": 0, "end": len(ids)}]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "weight_versions": spans}
        return {"request_id": "a", "choices": [choice]}
