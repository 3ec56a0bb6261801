"""Steps that are recorded and replayed: the same bits as by the modules, and only where that is known."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AttentionInterface, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.tiny import FAMILIES, ODD_FAMILIES
from tests.unit.models.support import sharp_lm
from tests.unit.samplers.scripted import EOS, prompts, sampler
from trlx_like.models import faster as faster_module
from trlx_like.models.faster import faster
from trlx_like.samplers import recorded
from trlx_like.samplers.recorded import Steps

TEXTS = ["abcdefghij"[: 1 + number * 5 % 9] for number in range(9)]
OTHER_ATTENTION = ("gemma2", "bloom", "falcon")
"""Families whose attention does not come from the interface of transformers."""
Made = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step is recorded early."""
    monkeypatch.setattr(recorded, "WORTH", 2)


@contextmanager
def computed() -> Iterator[list[int]]:
    """Collects the rows of each step that the modules compute."""
    steps, call = list[int](), Steps.__call__

    def count(self: Steps, tokens: Tensor, mask: Any, positions: Any, cache: Any, compute: Any) -> Tensor:
        def counted() -> Tensor:
            steps.append(len(tokens))
            made: Tensor = compute()
            return made

        return call(self, tokens, mask, positions, cache, counted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steps, "__call__", count)
        yield steps


def write(lm: PreTrainedModel, engine: Any = None, texts: list[str] = TEXTS, **given: Any) -> Made:
    """Responses to prompts of several lengths, of which four are written at a time, and their log-probabilities."""
    made = sampler(lm=lm, batch_size=4)
    if engine is not None:
        made.engine = engine
    sample = made.sample(
        prompts(texts), {"max_new_tokens": 20, "eos_token_id": [EOS, 5, 10, 15], **given}, 3, choices=True
    )
    assert sample.sampling_logprobs is not None
    return sample.completion.response, sample.sampling_logprobs


def by_modules(lm: PreTrainedModel, **given: Any) -> Made:
    """The same without a record."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded, "TRACER", False)
        return write(lm, **given)


def equal(one: Made, two: Made) -> bool:
    return all(map(torch.equal, one, two))


def engine_of(lm: PreTrainedModel) -> Any:
    return sampler(lm=lm).engine


@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES)
@pytest.mark.parametrize("given", [{}, {"top_k": 5}])
def test_a_replayed_step_has_the_bits_of_the_modules(family: str, given: dict[str, Any]) -> None:
    """While rows leave and others come, beside rows that are shorter or not."""
    lm = sharp_lm(family)
    with computed() as every:
        right = by_modules(lm, **given)
    engine = engine_of(lm)
    with computed() as some:
        for _ in range(4):
            assert equal(write(lm, engine, **given), right)
    if family in OTHER_ATTENTION:
        assert some == 4 * every
    else:
        assert len(some) <= 4 * (recorded.WORTH + recorded.CHECKED)  # few rows and more of them, padded or not


def test_one_row_is_replayed_from_the_first_step_on_once_it_is_recorded() -> None:
    lm = sharp_lm("gpt2")
    engine = engine_of(lm)
    given: dict[str, Any] = {"texts": ["abc"], "eos_token_id": None}
    with computed() as first:
        write(lm, engine, **given)
    with computed() as second:
        again = write(lm, engine, **given)
    assert first == [1] * (recorded.WORTH + recorded.CHECKED) and second == []
    assert equal(again, by_modules(lm, **given))


def test_the_present_weights_are_used_and_a_new_one_is_recorded() -> None:
    lm: Any = sharp_lm("llama")
    engine = engine_of(lm)
    given: dict[str, Any] = {"texts": ["abc"], "eos_token_id": None}
    before = write(lm, engine, **given)
    with torch.no_grad():
        for weight in lm.parameters():
            weight.mul_(1.1)
    with computed() as steps:
        after = write(lm, engine, **given)
    assert not steps and not equal(after, before) and equal(after, by_modules(lm, **given))
    gate = lm.model.layers[1].mlp.gate_proj
    gate.weight = nn.Parameter(-gate.weight.detach())
    with computed() as steps:
        after = write(lm, engine, **given)
    assert equal(after, by_modules(lm, **given))
    assert steps == [1] * (2 * recorded.WORTH + recorded.CHECKED), "it takes twice as many steps until it is worth it"
    lm.model.layers[0].mlp.act_fn = nn.Tanh()
    assert equal(write(lm, engine, **given), by_modules(lm, **given))


@pytest.mark.parametrize(
    "kind", ["window", "hook", "hook of all", "16 bits", "own module", "own method", "eager", "PYTORCH_JIT"]
)
def test_a_step_that_is_not_known_to_be_the_same_is_computed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "PYTORCH_JIT":
        monkeypatch.setattr(torch.jit._trace, "_enabled", False)
    lm: Any = sharp_lm("qwen3_window" if kind == "window" else "llama")
    mlp = lm.model.layers[0].mlp
    if kind == "hook":
        mlp.register_forward_hook(lambda *_: None)
    elif kind == "16 bits":
        lm.to(torch.bfloat16)
    elif kind == "own module":
        mlp.act_fn = type("Own", (nn.SiLU,), {"__module__": "somewhere"})()
    elif kind == "own method":
        mlp.forward = type(mlp).forward.__get__(mlp)
    elif kind == "eager":
        lm.set_attn_implementation("eager")
    handle = register_module_forward_pre_hook(lambda *_: None) if kind == "hook of all" else None
    with computed() as every:
        right = by_modules(lm)
    with computed() as some:
        assert equal(write(lm), right)
    if handle is not None:
        handle.remove()
    assert some == every


@pytest.mark.parametrize("what", ["numbers", "rows"])
def test_a_model_that_decides_by_what_it_sees_is_not_recorded(what: str, caplog: pytest.LogCaptureFixture) -> None:
    class Deciding(LlamaMLP):
        def forward(self, x: Tensor) -> Tensor:
            states: Tensor = x if (x.sum() > 0 if what == "numbers" else len(x) > 2) else super().forward(x)
            return states

    Deciding.__module__ = "transformers.deciding"
    lm: Any = sharp_lm("llama")
    lm.model.layers[0].mlp.__class__ = Deciding
    with computed() as every:
        right = by_modules(lm)
    with computed() as some, caplog.at_level(logging.DEBUG, "trlx_like"):
        assert equal(write(lm), right)
    assert some == every and "cannot be replayed" in caplog.text


def test_a_record_that_computes_something_else_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has written into the cache is written over."""

    def attend(*given: Any, **more: Any) -> tuple[Tensor, None]:
        return 2 * recorded._attend(*given, **more)[0], None

    monkeypatch.setitem(AttentionInterface._global_mapping, recorded.RECORDED, attend)
    lm = sharp_lm("llama")
    with computed() as every:
        right = by_modules(lm)
    with computed() as some:
        assert equal(write(lm), right)
    assert some == every


def test_rows_for_which_layers_choose_other_kernels_have_a_record_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of 64 numbers take torch's GELU, three and more a sigmoid."""
    lm: Any = faster(sharp_lm("gpt2"))
    width = lm.transformer.h[0].mlp.c_fc.weight.shape[1]
    monkeypatch.setattr(faster_module, "ACTIVATED", 3 * width)
    assert faster_module.choices(lm, 2) != faster_module.choices(lm, 3)
    engine, right = engine_of(lm), by_modules(lm)
    assert all(equal(write(lm, engine), right) for _ in range(3))
    assert len({key[1] for key, step in engine.steps._recorded.items() if step.replay is not None}) > 1


def test_a_model_is_freed_although_it_was_recorded() -> None:
    lm: Any = sharp_lm("gpt2")
    engine = engine_of(lm)
    write(lm, engine)
    parts = [weakref.ref(lm), weakref.ref(lm.transformer.h[0]), weakref.ref(lm.transformer.wte.weight)]
    del lm, engine
    gc.collect()
    assert [part() for part in parts] == [None] * 3
