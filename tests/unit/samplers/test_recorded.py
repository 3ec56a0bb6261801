"""Steps that are recorded and replayed: the same bits as by the modules, and only where that is known."""

from __future__ import annotations

import gc
import logging
import resource
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import CONFIG_MAPPING, AttentionInterface, AutoModelForCausalLM, PreTrainedModel
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
ONE: dict[str, Any] = {"texts": ["abc"], "eos_token_id": None}


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
    for _ in range(2):  # until all numbers of rows are known
        assert equal(write(lm, engine, **given), right)
    with computed() as some:
        assert equal(write(lm, engine, **given), right)
    assert (every or family == "bloom") and some == (every if family in OTHER_ATTENTION else [])


def test_records_outlive_a_hook_of_all_modules() -> None:
    """Under which nothing is replayed, and modules are called in full."""
    lm = sharp_lm("llama")
    engine = engine_of(lm)
    right = [write(lm, engine) for _ in range(3)][-1]
    handle = register_module_forward_pre_hook(lambda *_: None)
    with computed() as some:
        assert equal(write(lm, engine), right)
    handle.remove()
    assert some
    with computed() as some:
        assert equal(write(lm, engine), right)
    assert not some


def test_a_record_has_each_constant_and_size_once() -> None:
    """Between the operations of a small model the interpreter takes most of the time."""
    engine = engine_of(sharp_lm("gpt2"))
    write(engine.lm, engine)
    records = [record for made in engine.steps._records.values() for record in made]
    assert records
    for record in records:
        kinds = Counter(node.kind() for node in record.graph.nodes())
        assert not kinds["prim::NumToTensor"] and not kinds["aten::index_copy_"]
        assert kinds["prim::Constant"] < kinds["aten::addmm"] * 4, kinds


def test_one_row_is_replayed_from_the_first_step_on_once_it_is_recorded() -> None:
    lm = sharp_lm("gpt2")
    engine = engine_of(lm)
    with computed() as first:
        write(lm, engine, **ONE)
    with computed() as second:
        again = write(lm, engine, **ONE)
    assert first == [1] * (recorded.WORTH + 3), "rows are compared with 5, 10 and 20 tokens before them"
    assert second == []
    assert equal(again, by_modules(lm, **ONE))


def test_the_present_weights_are_used() -> None:
    lm: Any = sharp_lm("llama")
    engine = engine_of(lm)
    before = write(lm, engine, **ONE)
    with torch.no_grad():
        for weight in lm.parameters():
            weight.mul_(1.1)
    gate = lm.model.layers[1].mlp.gate_proj
    gate.weight = nn.Parameter(-gate.weight.detach())
    with computed() as steps:
        after = write(lm, engine, **ONE)
    assert not steps and not equal(after, before) and equal(after, by_modules(lm, **ONE))


def test_records_outlive_that_the_model_is_saved(tmp_path: Path) -> None:
    lm = sharp_lm("gpt2")
    engine = engine_of(lm)
    before = write(lm, engine, **ONE)
    lm.save_pretrained(tmp_path)  # in a checkpoint
    with computed() as steps:
        after = write(lm, engine, **ONE)
    assert not steps and equal(after, before)


@pytest.mark.parametrize("what", ["module", "number", "option", "width"])
def test_a_model_that_has_changed_is_recorded_anew(what: str) -> None:
    lm: Any = sharp_lm("cohere")
    engine = engine_of(lm)
    before = write(lm, engine, **ONE)
    layer = lm.model.layers[0]
    if what == "module":
        layer.mlp.act_fn = nn.Tanh()
    elif what == "number":
        lm.logit_scale *= 2
    elif what == "option":
        lm.config.use_parallel = True  # nothing reads it
    else:
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(layer.mlp, name)
            linear.weight = nn.Parameter(linear.weight.narrow(int(name == "down_proj"), 0, 9).detach().clone())
    with computed() as steps:
        after = write(lm, engine, **ONE)
    assert len(steps) == recorded.WORTH + 3 and equal(after, by_modules(lm, **ONE))
    assert equal(after, before) == (what == "option")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
        ("llama4_text", {"attention_chunk_size": 16, "layer_types": ["chunked_attention", "full_attention"]}),
    ],
)
def test_a_layer_that_does_not_see_all_tokens_is_not_recorded(family: str, options: dict[str, Any]) -> None:
    """Its window is in the mask alone."""
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 32, "head_dim": 8, "intermediate_size_mlp": 32}
    sizes |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16)
    sizes |= dict.fromkeys(("num_experts", "num_local_experts"), 4) | {"pad_token_id": 1, "eos_token_id": 0}
    torch.manual_seed(0)
    lm: Any = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**sizes, **options)).eval()
    with computed() as every:
        right = by_modules(lm, max_new_tokens=40, **ONE)
    with computed() as some:
        assert equal(write(lm, max_new_tokens=40, **ONE), right)
    assert some == every and len(every) == 39


@pytest.mark.parametrize(
    "kind", ["window", "hook", "hook of all", "16 bits", "own module", "own method", "eager", "PYTORCH_JIT"]
)
def test_a_step_that_is_not_known_to_be_the_same_is_computed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "PYTORCH_JIT":
        monkeypatch.setattr(recorded, "TRACER", False)
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
    """Two rows take torch's GELU, three and more a sigmoid."""
    lm: Any = faster(sharp_lm("gpt2"))
    monkeypatch.setattr(faster_module, "LEAST_IN_A_STEP", 3 * lm.transformer.h[0].mlp.c_fc.weight.shape[1])
    engine, right = engine_of(lm), by_modules(lm)
    for _ in range(3):
        assert equal(write(lm, engine), right)
    assert max(map(len, engine.steps._records.values())) == 2
    with computed() as steps:
        write(lm, engine)
    assert not steps
    monkeypatch.setattr(recorded, "MOST", 1)
    engine = engine_of(lm)
    for _ in range(3):
        assert equal(write(lm, engine), right)


def test_a_record_keeps_neither_the_model_nor_its_weights() -> None:
    lm: Any = sharp_lm("gpt2")
    engine = engine_of(lm)
    write(lm, engine)
    head = lm.transformer.h[0].mlp.c_fc
    weight, block = weakref.ref(head.weight), weakref.ref(lm.transformer.h[0])
    head.weight = nn.Parameter(head.weight.detach().clone())
    gc.collect()
    assert weight() is None
    records = engine.steps._records
    del lm, engine, head
    gc.collect()
    assert block() is None and records


def test_records_take_no_memory_that_is_never_freed() -> None:
    """One more of a model with 24 layers takes less than .2 MB, where a class for each module took 50."""
    lm = sharp_lm("llama", num_hidden_layers=24)

    def resident() -> float:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    for _ in range(2):
        write(lm, **ONE)
    before = resident()
    for _ in range(5):
        write(lm, **ONE)
    assert resident() - before < 10
