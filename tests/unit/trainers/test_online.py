"""Sampling and scoring of a round: how it is cut, what the reward function sees, statistics."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config

from tests.contract.recipes import PROMPTS, count_letters, make
from tests.tiny import tiny_config
from trlx_like.errors import ConfigError


class Record:
    """A reward function that keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **given: Any) -> list[float]:
        self.calls.append(given)
        return count_letters(given["outputs"])


def test_a_round_is_sampled_and_scored_in_chunks(tmp_path: Path) -> None:
    """Seven rollouts, three at once; the five prompts come in a new order when they have run out."""
    record = Record()
    trainer = make("PPOTrainer", tmp_path, reward_fn=record, **{"method.num_rollouts": 7})
    trainer.make_experience()
    assert [len(call["outputs"]) for call in record.calls] == [3, 3, 1]
    prompts = [prompt for call in record.calls for prompt in call["prompts"]]
    assert sorted(prompts[:5]) == sorted(PROMPTS)
    assert set(prompts[5:]) <= set(PROMPTS)
    assert len(trainer.store) == 7


def test_a_model_of_images_too_is_trained_on_text(tmp_path: Path) -> None:
    """The number of its tokens, which a table of tokens must have, is in a part of its configuration."""
    text: dict[str, Any] = {"vocab_size": 32, "intermediate_size": 32, "num_key_value_heads": 1, "head_dim": 8}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {**sizes, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config={**text, **sizes}, vision_config=vision, image_token_index=31)
    allowed = torch.ones(32, 32, dtype=torch.bool)
    allowed[:, 31] = False
    trainer = make("PPOTrainer", tmp_path, logit_mask=allowed, **{"model.model_path": config})
    trainer.learn()
    assert trainer.finished and trainer.store.elements
    assert not any((element.response == 31).any() for element in trainer.store.elements)


def test_what_a_reward_function_is_given(tmp_path: Path) -> None:
    record = Record()
    prompts = [{"prompt": text, "answer": text.upper()} for text in PROMPTS]
    trainer = make("PPOTrainer", tmp_path, reward_fn=record, prompts=prompts)
    trainer.make_experience()
    for call in record.calls:
        assert set(call) == {"samples", "prompts", "outputs", "tokenizer", "answer"}
        assert call["tokenizer"] is trainer.tokenizer
        assert call["answer"] == [prompt.upper() for prompt in call["prompts"]]
        assert call["samples"] == [p + o for p, o in zip(call["prompts"], call["outputs"], strict=True)]
    assert prompts[0] == {"prompt": "ab", "answer": "AB"}


def test_what_was_sampled_is_what_is_stored(tmp_path: Path) -> None:
    """The ids themselves, not those of the text made from them."""
    sampled: list[torch.Tensor] = []
    trainer = make("PPOTrainer", tmp_path)
    sample = trainer.sampler.sample

    def watch(*args: Any, **options: Any) -> Any:
        samples = sample(*args, **options)
        sampled.extend(torch.cat([e.prompt, e.response]) for e in samples.completion.split())
        return samples

    trainer.sampler.sample = watch
    trainer.make_experience()
    stored = [torch.cat([element.prompt, element.response]) for element in trainer.store.elements]
    assert len(stored) == len(sampled) == 5
    assert all(torch.equal(one, other) for one, other in zip(stored, sampled, strict=True))


def test_experience_has_generation_options_of_its_own(tmp_path: Path) -> None:
    """Evaluation may do what training must not."""
    changes = {"method.gen_kwargs": {"max_new_tokens": 5, "top_k": 3, "temperature": [0.5, 2.0]}}
    own = {"method.gen_experience_kwargs": {"max_new_tokens": 2, "temperature": 1.3}}
    trainer = make("PPOTrainer", tmp_path, **changes, **own)
    trainer.make_experience()
    assert trainer.temperature == trainer.model.temperature == 1.3
    assert {len(element.response) for element in trainer.store.elements} <= {1, 2}
    assert max(len(response) for response in trainer.generate(["ab"] * 8)) <= 2
    assert max(len(response) for response in trainer.generate_eval(["ab"] * 8)) == 5
    assert trainer.generate(["ab"], max_new_tokens=1)[0].shape == (1,)


def test_queries_are_text_or_ids(tmp_path: Path) -> None:
    trainer = make("PPOTrainer", tmp_path)
    assert trainer.by_hand.ids("abc") == [2, 3, 4]
    assert trainer.by_hand.ids(torch.tensor([[2, 3]])) == [2, 3]
    responses = trainer.generate(["abc", torch.tensor([2])])
    assert [response.dim() for response in responses] == [1, 1]
    assert trainer.decode([torch.tensor([2, 3, 0])]) == ["ab"]


@pytest.mark.parametrize("name", ["reward_fn", "prompts"])
def test_what_it_cannot_do_without(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"PPOTrainer needs {name}: pass train\({name}=...\) or set data.{name}"):
        make("PPOTrainer", tmp_path, **{name: None})


LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 2.0},
    **{"short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.seq_length": 65}, r"train.seq_length \(65\) is longer than the 64 positions of the model"),
        (
            {"train.seq_length": 33, "model.model_path": tiny_config("llama", rope_parameters=LONGROPE)},
            r"train.seq_length \(33\) should be at most 32 for this model \(llama\)",
        ),
        (
            {"method.gen_kwargs.forced_bos_token_id": 3},
            r"method.gen_kwargs.forced_bos_token_id \(3\) is for encoder-decoders; end the prompts with the token",
        ),
        (
            {"logit_mask": torch.ones(3, 3).bool()},
            r"logit_mask must be a bool tensor \[32, 32\].*not torch.bool \[3, 3\]",
        ),
        ({"logit_mask": torch.ones(32, 32)}, r"logit_mask must be a bool tensor"),
    ],
)
def test_what_does_not_fit_the_model(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make("PPOTrainer", tmp_path, **changes)


@pytest.mark.parametrize(
    ("name", "level"),
    [("PPOTrainer", "token"), ("PPOTrainer", "sequence"), ("GRPOTrainer", "token"), ("RLOOTrainer", "sequence")],
)
def test_the_correction_weights_advantages_by_the_capped_ratio(name: str, level: str, tmp_path: Path) -> None:
    """Against float64 in Python; the engine samples in bfloat16, so that its probabilities differ."""
    engine = {"sampler.engine": "copy", "sampler.kwargs": {"dtype": "bfloat16"}}
    cap = 1.0001
    given = {"method.rollout_correction": level, "method.rollout_correction_cap": cap}
    plain = make(name, tmp_path / "a", **engine)
    assert "policy/rollout_ratio" not in plain.make_experience()
    corrected = make(name, tmp_path / "b", **engine, **given)
    metrics = corrected.make_experience()
    ratios: list[float] = []
    pairs = list(zip(plain.store.elements, corrected.store.elements, strict=True))
    for before, after in pairs:
        assert torch.equal(before.response, after.response) and before.sampling_logprobs is None
        apart = (after.old_logprobs.double() - after.sampling_logprobs.double()).tolist()
        apart = [math.fsum(apart)] * len(apart) if level == "sequence" else apart
        own = [math.exp(difference) for difference in apart]
        expected = before.advantages.double() * torch.tensor([min(ratio, cap) for ratio in own], dtype=torch.float64)
        torch.testing.assert_close(after.advantages.double(), expected, rtol=2e-6, atol=1e-7)
        ratios += own
    assert max(ratios) > cap and min(ratios) < 1 / cap
    assert metrics["policy/rollout_ratio"] == pytest.approx(math.fsum(ratios) / len(ratios), rel=1e-6)
    assert metrics["policy/rollout_ratio_capped"] == pytest.approx(sum(r > cap for r in ratios) / len(ratios))
    assert corrected.learn()["policy/rollout_ratio"] > 0


def test_a_correction_needs_the_log_probabilities_of_the_engine(tmp_path: Path) -> None:
    trainer = make("PPOTrainer", tmp_path, **{"method.rollout_correction": "token"})
    with pytest.raises(ConfigError, match=r"^method.rollout_correction \('token'\) needs the log-probabilities of th"):
        trainer.step(["ab"], trainer.generate(["ab"]), [1.0])
