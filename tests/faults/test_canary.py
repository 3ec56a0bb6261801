"""A sampler whose weights are not those that are trained is found out in the round in which it goes wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    MiniMaxConfig,
    OpenAIGPTConfig,
    PretrainedConfig,
    XGLMConfig,
)
from typer.testing import CliRunner

from tests.contract.recipes import LORA, few, make
from tests.contract.runs import assert_same, assert_same_run, rows
from tests.distributed.ranks import on_ranks
from tests.tiny import tiny_config, tiny_lm, tiny_tokenizer
from trlx_like.cli import app
from trlx_like.data import Completion
from trlx_like.errors import ConfigError, SamplerError
from trlx_like.models.merging import mismerged_weights
from trlx_like.samplers.canary import some_of
from trlx_like.samplers.engines import ENGINES
from trlx_like.samplers.plain_copy import CopyEngine

ONLINE = ["GRPOTrainer", "OnlineDPOTrainer", "PPOTrainer", "RFTTrainer", "RLOOTrainer"]
# Moved away from the start, where the model without its adapter is the model with it.
ADAPTER = {"model.peft_config": {**LORA, "init_lora_weights": False}}
ROUNDS = {"train.epochs": 4, "train.checkpoint_interval": 1000}
LAYER = "transformer.h.1.attn.c_attn.weight"  # one that has an adapter

Held = dict[str, torch.Tensor]


def skipped(lm: nn.Module, held: Held, before: Held) -> None:
    for name, weight in held.items():
        weight.copy_(before[name])


def base(lm: nn.Module, held: Held, before: Held) -> None:
    for name, cause, weight in mismerged_weights(lm):
        if cause == "without the adapter":
            held[name].copy_(weight)


def merged_twice(lm: nn.Module, held: Held, before: Held) -> None:
    """What is added to the weights in place stays there: the next merge is on top of it."""
    for name, cause, weight in mismerged_weights(lm):
        if cause == "with the adapter twice":
            held[name].copy_(weight)


def stale_layer(lm: nn.Module, held: Held, before: Held) -> None:
    held[LAYER].copy_(before[LAYER])


def cast(lm: nn.Module, held: Held, before: Held) -> None:
    for weight in held.values():
        weight.copy_(weight.bfloat16())


def permuted(lm: nn.Module, held: Held, before: Held) -> None:
    """Two rows trade places, as shards that were joined in the wrong order."""
    held[LAYER][[0, 1]] = held[LAYER][[1, 0]]


FAULTS: dict[str, tuple[Callable[[nn.Module, Held, Held], None], str]] = {
    "skipped update": (
        skipped,
        r"all \d+ weights that the last round changed are as before the last round: an update was skipped",
    ),
    "base weights": (
        base,
        r"of 28 weights 2 \(the first is transformer\.h\.0\.attn\.c_attn\.weight\) are without the adapter",
    ),
    "double merge": (
        merged_twice,
        r"of 28 weights 2 \(the first is transformer\.h\.0\.attn\.c_attn\.weight\) are with the adapter twice",
    ),
    "stale layer": (stale_layer, rf"of 28 weights {re.escape(LAYER)} is as before the last round"),
    "cast": (cast, r"of 28 weights \d+ \(the first is transformer\.wte\.weight\) are rounded to bfloat16"),
    "permuted shard": (
        permuted,
        rf"of 28 weights {re.escape(LAYER)} is in another order, the right numbers at wrong places",
    ),
}


class Faulty(CopyEngine):
    """Goes wrong when it is brought up to date for the third time: after the evaluation and the round at the start."""

    fault: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.policy, self.syncs = args[0], 0

    @torch.no_grad()
    def sync_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        held = dict(self.lm.named_parameters())
        before = {name: weight.clone() for name, weight in held.items()}
        super().sync_weights(weights, version)
        self.syncs += 1
        if self.syncs == 3:
            type(self).fault(self.policy, held, before)


@pytest.fixture(autouse=True)
def faulty_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINES, "_entries", dict(ENGINES._entries))
    for name, (fault, _) in FAULTS.items():
        ENGINES.register(f"faulty: {name}")(type("FaultyNow", (Faulty,), {"fault": staticmethod(fault)}))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_within_the_round(fault: str, tmp_path: Path) -> None:
    """The run stops before it learns from the round, says which weight and why, and is saved as it was before."""
    healthy = make("PPOTrainer", tmp_path / "healthy", **ADAPTER, **ROUNDS, **{"sampler.engine": "copy"})
    healthy.config.train.total_steps = 4  # two passes over two batches: the first round
    healthy.learn()
    trainer = make("PPOTrainer", tmp_path / "faulty", **ADAPTER, **ROUNDS, **{"sampler.engine": f"faulty: {fault}"})
    with pytest.raises(SamplerError) as stopped:
        trainer.learn()
    message = str(stopped.value)
    assert "\n" not in message
    assert re.search(
        rf"^sampler\.engine \(faulty: {fault}\) does not hold the weights that are trained: {FAULTS[fault][1]}\. "
        r"Nothing of round 2 was learned from\. ",
        message,
    ), message
    assert rows(tmp_path / "faulty")[-1]["step"] == 4
    again = make("PPOTrainer", tmp_path / "again", **ADAPTER, **ROUNDS)
    again.load(tmp_path / "faulty")
    assert_same(again.model.state_dict(), healthy.model.state_dict())
    assert (again.progress.round, again.progress.step) == (1, 4)


class Behind(CopyEngine):
    """Misses its third update, and cannot read its own weights: a server, for example."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.syncs = 0

    def sync_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        self.syncs += 1
        if self.syncs != 3:
            super().sync_weights(weights, version)

    def digests(self) -> None:  # type: ignore[override]
        return None


def test_a_stale_version_is_found_without_checksums(tmp_path: Path) -> None:
    ENGINES.register("behind")(Behind)
    trainer = make("PPOTrainer", tmp_path, **ROUNDS, **{"sampler.engine": "behind"})
    with pytest.raises(
        SamplerError,
        match=r"sampled with version 0 of the weights and the present one is 4: an update was missed\. Noth",
    ):
        trainer.learn()


def test_an_engine_that_takes_a_module_is_refused_by_name(tmp_path: Path) -> None:
    class Older(CopyEngine):
        def sync_weights(self, lm: nn.Module) -> None:  # type: ignore[override]
            return

    ENGINES.register("older")(Older)
    with pytest.raises(ConfigError, match=r"^sampler.engine \(older\): sync_weights must take \(weights, version\)"):
        make("PPOTrainer", tmp_path, **{"sampler.engine": "older"})


class Lost(CopyEngine):
    """Cannot be reached on the second process, in the second round."""

    def generate(self, *args: Any, **options: Any) -> Any:
        if self.version > 0 and torch.distributed.get_rank():
            raise SamplerError("sampler.engine (lost) does not answer.")
        return super().generate(*args, **options)


def _lost(rank: int, folder: Path) -> tuple[str, int]:
    ENGINES.register("lost")(Lost)
    trainer = make("PPOTrainer", folder, **ROUNDS, **{"sampler.engine": "lost", "train.batch_size": 4})
    with pytest.raises(SamplerError) as stopped:
        trainer.learn()
    return str(stopped.value), trainer.progress.round


def test_an_engine_that_fails_on_one_process_stops_all_of_them(tmp_path: Path) -> None:
    said = "sampler.engine (lost) does not answer."
    assert on_ranks(_lost, tmp_path, timeout=60) == [(f"On process 1: {said}", 1), (said, 1)]


@pytest.mark.parametrize("name", ONLINE)
def test_every_online_trainer_asks(name: str, tmp_path: Path) -> None:
    with pytest.raises(SamplerError, match="an update was skipped"):
        make(name, tmp_path, **ROUNDS, **{"sampler.engine": "faulty: skipped update"}).learn()


def _stopped(rank: int, folder: Path) -> tuple[str, int]:
    engine = {"sampler.engine": "faulty: stale layer" if rank else "copy"}
    trainer = make("PPOTrainer", folder, **ADAPTER, **ROUNDS, **engine, **{"train.batch_size": 4})
    with pytest.raises(SamplerError) as stopped:
        trainer.learn()
    return str(stopped.value), trainer.progress.step


def test_all_processes_stop_where_one_is_wrong(tmp_path: Path) -> None:
    (first, step), (second, other) = on_ranks(_stopped, tmp_path, timeout=60)
    assert step == other > 0
    assert f"on process 1: of 28 weights {LAYER} is as before" in first
    assert f"on process 1: of 28 weights {LAYER} is as before" in second
    assert list(tmp_path.glob("checkpoint_*"))


@pytest.mark.parametrize("fault", ["base weights", "double merge", "permuted shard", "stale layer"])
def test_the_ratio_sees_what_the_checksum_takes_for_right(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mistake on both sides of the checksum: the sampler vouches for weights that are wrong.

    A cast is not among them: what it does to a ratio is in the tolerance of the ratio, and only the checksum sees it.
    """
    engine = {"sampler.engine": f"faulty: {fault}"}
    trainer = make("PPOTrainer", tmp_path, **ADAPTER, **ROUNDS, **engine, **{"optimizer.kwargs": {"lr": 0.03}})
    monkeypatch.setattr(trainer.agreement.canary, "weights", lambda *_: None)
    with pytest.raises(SamplerError, match=r"the learner disagree about what was sampled: the ratio .* 0\.001"):
        trainer.learn()


@pytest.mark.parametrize("dtype", ["bfloat16", None])
@pytest.mark.parametrize("name", few(ONLINE))
def test_a_sound_copy_is_let_through(name: str, dtype: str | None, tmp_path: Path) -> None:
    """Rounded on purpose it is compared with what is rounded."""
    options = {"sampler.engine": "copy", "sampler.kwargs": {} if dtype is None else {"dtype": dtype}}
    trainer = make(name, tmp_path, **(ADAPTER if name != "RFTTrainer" else {}), **ROUNDS, **options)
    trainer.learn()
    held = dict(trainer.sampler.engine.lm.named_parameters())
    assert {weight.dtype for weight in held.values()} == {getattr(torch, dtype or "float32")}
    assert trainer.progress.round > 2


HALF_BUFFERS: dict[str, PretrainedConfig] = {
    "causal mask": OpenAIGPTConfig(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=64),
    "positions": XGLMConfig(
        vocab_size=32, d_model=16, ffn_dim=32, num_layers=2, attention_heads=2, max_position_embeddings=64
    ),
    "decays": MiniMaxConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=2,
        block_size=8,
    ),
    "none, but rotary tables": tiny_config("llama"),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("buffers", HALF_BUFFERS)
def test_a_copy_in_16_bits_is_the_model_loaded_in_16_bits(buffers: str, dtype: Any, tmp_path: Path) -> None:
    """Some buffers are in 16 bits then, and rotary tables are not. A float32 copy of that model computes too."""
    AutoModelForCausalLM.from_config(HALF_BUFFERS[buffers]).save_pretrained(tmp_path)
    whole, half = (AutoModelForCausalLM.from_pretrained(tmp_path, dtype=kind) for kind in ("float32", dtype))
    ids, tokenizer = torch.arange(12).view(2, 6), tiny_tokenizer()
    copied = CopyEngine(whole, tokenizer, dtype=dtype).lm
    assert_same(dict(copied.named_buffers()), dict(half.named_buffers()))
    assert torch.equal(copied(ids).logits, half(ids).logits)
    back = CopyEngine(half, tokenizer, dtype="float32").lm(ids).logits
    torch.testing.assert_close(back, whole(ids).logits, rtol=0, atol=2e-3)


def test_a_copy_in_16_bits_of_a_class_that_takes_more_than_a_configuration() -> None:
    class Sized(LlamaForCausalLM):
        def __init__(self, config: Any, size: int) -> None:
            super().__init__(config)
            self.size = size

    lm = Sized(tiny_config("llama"), size=3).eval()
    ids, copied = torch.arange(12).view(2, 6), CopyEngine(lm, tiny_tokenizer(), dtype="bfloat16").lm
    assert {weight.dtype for weight in copied.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(copied(ids).logits.float(), lm(ids).logits, rtol=0, atol=2e-2)


@pytest.mark.parametrize("name", ["DPOTrainer", "PPOTrainer", "SFTTrainer"])
def test_a_copy_makes_the_run_that_the_model_itself_makes(name: str, tmp_path: Path) -> None:
    """Without an adapter nothing is merged, and both have the same numbers: in rounds and in evaluations."""
    options: dict[str, Any] = {"train.epochs": 2, "train.eval_interval": 2}
    if name == "DPOTrainer":
        options["method.generate_during_eval"] = True
    engines = "copy", "transformers"
    runs = [make(name, tmp_path / engine, **options, **{"sampler.engine": engine}) for engine in engines]
    for run in runs:
        run.learn()
    assert_same_run(*runs, *(tmp_path / engine for engine in engines))


@pytest.mark.parametrize("family", few(["gemma2", "cohere", "t5", "bart"], kept=("gemma2", "t5")))
def test_other_families_and_encoder_decoders(family: str, tmp_path: Path) -> None:
    """Capped and scaled logits, tied weights, decoders: the model's own forward is what the learner computes."""
    model: dict[str, Any] = {"model.model_path": tiny_config(family)}
    if family in ("t5", "bart"):
        model["model.model_arch_type"] = "seq2seq"
    lora = {"model.peft_config": {**LORA, "init_lora_weights": False, "target_modules": r".*(q_proj|\.q)"}}
    trainer = make("PPOTrainer", tmp_path, **model, **lora, **ROUNDS, **{"sampler.engine": "copy"})
    trainer.learn()
    assert trainer.progress.round == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, r"sampler\.kwargs\.dtype \('int8'\) must be one of float32, bfloat16, float16"),
        ({"bits": 4}, r"sampler\.kwargs \(\{'bits': 4\}\): copy: .* unexpected keyword argument 'bits'"),
    ],
)
def test_options_that_a_copy_does_not_have(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make("PPOTrainer", tmp_path, **{"sampler.engine": "copy", "sampler.kwargs": options})


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([30, 1, 1, 4, 1, 1, 5, 1, 1, 33], [0, 9, 3]),  # 63 are not enough, 67 are
        ([30, 1, 1, 4, 1, 1, 5, 1, 1, 34], [0, 9]),
        ([2, 1, 1, 4, 1, 1, 5, 1, 1, 3], [0, 9, 3, 6]),
        ([300, 1, 1, 4, 1, 1, 5, 1, 1, 3], [0, 9]),
        ([2, 3, 4], [0, 2, 1]),
        ([2, 3], [0, 1]),
        ([300], [0]),
    ],
)
def test_whose_ratio_is_taken(lengths: list[int], rows: list[int]) -> None:
    """From all over the chunk; no more than 256 tokens of a response."""
    ids = [torch.arange(length) for length in lengths]
    prompts = [torch.tensor([row] * (row + 1)) for row in range(len(lengths))]
    chunk = [
        Completion(p, torch.ones_like(p).bool(), r, torch.ones_like(r).bool())
        for p, r in zip(prompts, ids, strict=True)
    ]
    batch = Completion.collate(chunk)
    few = some_of(batch, -batch.response.float())
    assert few.prompt[:, -1].tolist() == rows
    assert few.sampling_logprobs is not None and torch.equal(few.sampling_logprobs, -few.response.float())
    assert few.mask.sum(dim=1).tolist() == [min(lengths[row], 256) for row in rows]
    assert (few.prompt.shape[1], few.mask.shape[1]) == (max(rows) + 1, min(256, max(lengths[row] for row in rows)))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # of peft, and so it is
def test_a_copy_of_a_weight_of_two_layers_with_one_adapter(tmp_path: Path) -> None:
    """Each layer of the copy has its own, or the canary would stop the run."""
    options = {"model.peft_config": {**LORA, "target_modules": ["lm_head"]}, "sampler.engine": "copy"}
    trainer = make("PPOTrainer", tmp_path, **options, **ROUNDS)
    trainer.learn()
    assert trainer.progress.round == 4


@pytest.mark.parametrize("name", ["GRPOTrainer", "OnlineDPOTrainer"])
def test_a_model_in_float64_is_compared_as_one_in_float32(name: str, tmp_path: Path) -> None:
    trainer = make(name, tmp_path, **{"model.model_path": tiny_lm("llama").double(), "train.total_steps": 1})
    assert {weight.dtype for weight in trainer.model.parameters()} == {torch.float64}
    assert trainer.agreement.tolerance(trainer.model) == 1e-3
    trainer.learn()
    assert trainer.progress.step == 1


def test_the_command_line_says_it_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise SamplerError("sampler.engine (copy) does not hold the weights that are trained.")

    monkeypatch.setattr("trlx_like.api.read_config", refuse)
    result = CliRunner().invoke(app, ["train", "any.yml"])
    assert (result.exit_code, result.stderr) == (
        3,
        "sampler.engine (copy) does not hold the weights that are trained.\n",
    )


@pytest.mark.usefixtures("number_format")
def test_merged_adapters_are_compared_in_their_own_numbers(tmp_path: Path) -> None:
    """In bf16 the learner runs under autocast, which would round the product of an adapter's matrices."""
    changes = {
        "model.peft_config": {"peft_type": "LORA", "r": 2, "lora_alpha": 64, "init_lora_weights": False},
        "sampler.engine": "copy",
        "backend.mixed_precision": "bf16",
    }
    trainer = make("PPOTrainer", tmp_path, **changes)
    trainer.make_experience()
    assert len(trainer.store) == 5
