"""The engine "vllm" against a server on loopback with a real small model: sound, killed, stalled, stale, wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from tests.contract.recipes import LORA, make
from tests.distributed.ranks import on_ranks
from tests.tiny import save_tiny, tiny_lm
from tests.unit.samplers.vllm_server import VLLMServer
from trlx_like.errors import ConfigError, SamplerError
from trlx_like.trainers.callbacks import Callback

ROUNDS = {"train.epochs": 3, "train.checkpoint_interval": 1000}
LIMITS = {"timeout": 10.0, "retries": 1, "backoff": 0.01}


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server() -> Iterator[VLLMServer]:
    made = VLLMServer(tiny_lm())
    yield made
    made.kill()


def trainer_of(folder: Path, url: Any, name: str = "PPOTrainer", **more: Any) -> Any:
    kwargs = {"url": url, "folder": str(folder / "weights"), **LIMITS, **more.pop("kwargs", {})}
    options = {"model.model_path": tiny_lm(), "sampler.engine": "vllm", "sampler.kwargs": kwargs}
    return make(name, folder / "run", **ROUNDS, **{"optimizer.kwargs": {"lr": 0.03}}, **{**options, **more})


@pytest.mark.parametrize(
    ("name", "more"),
    [("PPOTrainer", {"model.peft_config": LORA}), ("GRPOTrainer", {"method.rollout_correction": "token"})],
)
def test_a_run_on_a_server(name: str, more: dict[str, Any], server: VLLMServer, tmp_path: Path) -> None:
    """Adapters merged and tied heads included; the canary sees it in every round, and the old weights are deleted."""
    trainer = trainer_of(tmp_path, [server.url, server.url], name, **more)
    metrics = trainer.learn()
    assert trainer.progress.round >= 2 and server.version == str(trainer.progress.step)
    assert metrics["policy/ratio_deviation"] < 1
    if name == "GRPOTrainer":
        assert metrics["policy/rollout_ratio"] == pytest.approx(1, abs=1e-4)
    assert [place.name for place in (tmp_path / "weights").iterdir()] == [f"weights-{server.version}"]
    samples = trainer.generate(["ab", "the cats"], max_new_tokens=4)
    assert all(1 <= len(ids) <= 4 for ids in samples)
    greedy = trainer.generate(["ab"], do_sample=False, max_new_tokens=4)[0]
    trainer.config.sampler.engine, trainer.config.sampler.kwargs = "transformers", {}
    trainer.sampler.engine = trainer.make_engine()
    assert torch.equal(trainer.generate(["ab"], do_sample=False, max_new_tokens=4)[0], greedy)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (
            "stale",
            r"sampled with version 0 of the weights and the present one is 4: an update was missed",
        ),
        ("wrong layer", r"learner disagree about what was sampled: the ratio of"),
        (
            "wrong log-probabilities",
            r"learner disagree about what was sampled: the ratio of",
        ),
        ("stalled", r"had not answered within sampler.kwargs.timeout \(1 s\)"),
        ("older vLLM", r"answered with no completion of vLLM 0.32 or newer"),
    ],
)
def test_a_fault_in_the_second_round_is_found(fault: str, sentence: str, server: VLLMServer, tmp_path: Path) -> None:
    """Nothing is learned from it, and the run is saved as it was."""
    kwargs = {"timeout": 1.0, "retries": 0} if fault == "stalled" else {}
    trainer = trainer_of(tmp_path, server.url, kwargs=kwargs)
    trainer.callbacks.append(After(4, lambda: setattr(server, "fault", fault)))
    with pytest.raises(SamplerError, match=sentence):
        trainer.learn()
    assert (trainer.progress.round, trainer.progress.step) == (1, 4)
    assert [place.name for place in (tmp_path / "run").glob("checkpoint_*")] == ["checkpoint_004"]


def test_a_server_that_is_killed_is_named(server: VLLMServer, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, server.url)
    trainer.callbacks.append(After(4, server.kill))
    with pytest.raises(SamplerError, match=rf"{re.escape(server.url)}/pause.* failed 2 times; the last time Con"):
        trainer.learn()


def test_a_server_that_starts_again_gets_the_weights_again(tmp_path: Path) -> None:
    """After they were sent and before prompts were."""
    server = VLLMServer(tiny_lm())
    held = [server]
    trainer = trainer_of(tmp_path, server.url)
    engine = trainer.sampler.engine
    plain = engine.generate

    def generate(*args: Any, **options: Any) -> Any:
        if engine.version == 4 and len(held) == 1:
            server.kill()
            held.append(server.restarted())
        return plain(*args, **options)

    engine.generate = generate
    trainer.learn()
    assert trainer.progress.round == 3 and len(held) == 2
    assert held[1].routes["/collective_rpc"] >= 2
    held[1].kill()


def test_the_reference_of_dpo_answers_itself(server: VLLMServer, tmp_path: Path) -> None:
    """Not the server, which holds the policy's weights or those that it was started with."""
    more: dict[str, Any] = {"model.ref_model_path": save_tiny(tmp_path / "other", seed=7)}
    more |= {"method.generate_during_eval": True, "method.gen_kwargs": {"max_new_tokens": 6, "do_sample": False}}
    served = trainer_of(tmp_path / "served", server.url, "DPOTrainer", **more)
    more |= {"sampler.engine": "transformers", "sampler.kwargs": {}}
    plain = trainer_of(tmp_path / "plain", server.url, "DPOTrainer", **more)
    served.learn()
    plain.learn()
    assert served.reference_texts == plain.reference_texts and any(map(any, plain.reference_texts.values()))


def _on_two(rank: int, folder: Path, url: str, kind: str) -> tuple[int, float]:
    more: dict[str, Any] = {"train.batch_size": 4, "backend.kind": kind}
    trainer = trainer_of(folder, url, **more)
    return trainer.learn()["rollout/samples"], trainer.progress.round


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_share_a_server(kind: str, server: VLLMServer, tmp_path: Path) -> None:
    """The main process alone sends weights, which are whole."""
    first, second = on_ranks(_on_two, tmp_path, server.url, kind, timeout=120)
    assert first == second and first[1] == 3
    assert server.routes["/collective_rpc"] == server.routes["/update_weight_version"] < 12


def test_generation_options_that_a_server_has_not(tmp_path: Path) -> None:
    engine = trainer_of(tmp_path, "http://127.0.0.1:1").sampler.engine
    with pytest.raises(ConfigError, match=r"^method.gen_kwargs.typical_p: sampler.engine \(vllm\) does not have it"):
        engine._params(GenerationConfig(max_new_tokens=3, do_sample=True, typical_p=0.5), [])
    params = engine._params(GenerationConfig(max_new_tokens=3, do_sample=False), [])
    assert (params["temperature"], params["max_tokens"], params["top_k"]) == (0.0, 3, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "node:8000"}, r"sampler.kwargs.url \('node:8000'\) must begin with http"),
        ({"url": []}, r"sampler.kwargs.url \(\[\]\) must name at least one server"),
        ({"timeout": 0.0}, r"sampler.kwargs.timeout \(0.0\) must be above 0"),
        ({"dtype": "int8"}, r"sampler.kwargs.dtype \('int8'\) must be one of"),
        ({"port": 1}, r"vllm: .* unexpected keyword argument 'port'"),
    ],
)
def test_options_that_cannot_be_followed(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer_of(tmp_path, "http://127.0.0.1:1", kwargs=options)


class After(Callback):
    """A callback that acts after a step."""

    def __init__(self, step: int, action: Callable[[], Any]) -> None:
        self.step, self.action = step, action

    def on_step(self, trainer: Any, metrics: Any) -> None:
        if trainer.progress.step == self.step:
            self.action()
