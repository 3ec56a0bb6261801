"""A reward model's loss is that of its pairs, whatever is beside them; its metrics say what they claim."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.contract.recipes import PAIRS, count_letters, lengths, make
from tests.contract.runs import rows
from tests.tiny import save_tiny, tiny_config, tiny_tokenizer
from tests.unit.pipelines.templates import CHATML, assistant, chat_tokenizer, user
from trlx_like import AutoModelForCausalLMWithValueHead, LossOutput, RewardModel
from trlx_like.errors import ConfigError, DataError
from trlx_like.trainers.reward import PreferencePair, RewardTrainer

EOS, A, B, C = 0, 2, 3, 4


def rewards_alone(trainer: RewardTrainer) -> list[tuple[float, float]]:
    """Of the chosen and the rejected answer of each pair, each in a batch of its own, by the model's own forward."""
    trainer.model.eval()
    with torch.no_grad():
        return [
            (float(trainer.model.lm(pair.chosen[None]).logits), float(trainer.model.lm(pair.rejected[None]).logits))
            for pair in trainer.pairs
        ]


def test_ids_of_a_pair(tmp_path: Path) -> None:
    trainer = make("RewardTrainer", tmp_path, preferences=[("a", "b", "bc"), {"chosen": "ab", "rejected": "ac"}])
    trainer.make_experience()
    first, second = trainer.store.elements
    assert first.chosen.tolist() == [A, B, EOS] and first.rejected.tolist() == [A, B, C, EOS]
    assert second.chosen.tolist() == [A, B, EOS] and second.rejected.tolist() == [A, C, EOS]
    assert all(pair.chosen_mask.all() and pair.rejected_mask.all() for pair in trainer.pairs)
    ids, mask = PreferencePair.collate([first, second]).both()
    assert ids.tolist() == [[A, B, EOS, 0], [A, B, EOS, 0], [A, B, C, EOS], [A, C, EOS, 0]]
    assert mask.tolist() == [[True] * 3 + [False], [True] * 3 + [False], [True] * 4, [True] * 3 + [False]]
    assert PreferencePair.collate([first, second]).common().tolist() == [2, 1]
    second.rejected, second.rejected_mask = second.chosen[:2], second.chosen_mask[:2]
    assert PreferencePair.collate([first, second]).common().tolist() == [2, 1]  # each has a token of its own


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_loss_and_metrics_of_a_step(coefficient: float, tmp_path: Path) -> None:
    changes = {"train.batch_size": 5, "method.center_rewards_coefficient": coefficient, "train.total_steps": 1}
    trainer = make("RewardTrainer", tmp_path, **changes, **{"train.minibatch_size": 1, "eval_preferences": PAIRS})
    pairs = rewards_alone(trainer)
    margins = [0.0, 0.5, 0.0, 0.0, -0.25]
    losses = [
        math.log1p(math.exp(-(chosen - rejected - margin))) + coefficient * (chosen + rejected) ** 2
        for (chosen, rejected), margin in zip(pairs, margins, strict=True)
    ]
    flat = [reward for pair in pairs for reward in pair]
    expected = {
        "losses/total_loss": sum(losses) / 5,
        "rewards/accuracies": sum(chosen > rejected for chosen, rejected in pairs) / 5,
        "rewards/margins": sum(chosen - rejected for chosen, rejected in pairs) / 5,
        "rewards/min": min(flat),
        "rewards/mean": sum(flat) / 10,
        "rewards/max": max(flat),
    }
    trainer.learn()
    before, step = rows(tmp_path)
    for name, value in expected.items():
        assert step[name] == pytest.approx(value, abs=1e-5), name
    assert step["data/pairs"] == 5 and step["data/tokens"] == sum(
        len(p.chosen) + len(p.rejected) for p in trainer.pairs
    )
    # What was evaluated before the step is what the step trained on.
    evaluated = {f"eval/{name}": value for name, value in expected.items()}
    assert {name: value for name, value in before.items() if name.startswith("eval/")} == pytest.approx(
        evaluated, abs=1e-5
    )


def test_an_evaluation_by_hand_records_no_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make("RewardTrainer", tmp_path, eval_preferences=[("a", "b", "c")])
    loss, recorded = trainer.loss, []

    def watched(batch: PreferencePair) -> LossOutput:
        output: LossOutput = loss(batch)
        recorded.append(output.sums("pairs")["pairs"].requires_grad)
        return output

    monkeypatch.setattr(trainer, "loss", watched)
    assert "eval/losses/total_loss" in trainer.evaluate() and recorded == [False]


def test_nothing_is_evaluated_without_pairs_to_evaluate_on(tmp_path: Path) -> None:
    make(
        "RewardTrainer", tmp_path, eval_preferences=None, **{"train.total_steps": 1, "train.best_metric": None}
    ).learn()
    assert not any(name.startswith("eval/") for row in rows(tmp_path) for name in row)


def test_several_sets_have_metrics_of_their_own(tmp_path: Path) -> None:
    """Those of a set are as if it were the only one, and those over all sets are as of one set with all pairs."""

    def evaluated(sets: Any) -> dict[str, float]:
        trainer = make("RewardTrainer", tmp_path, eval_preferences=sets, **{"train.minibatch_size": 1})
        trainer.model.eval()
        return dict(trainer.evaluate())

    alone = {name: evaluated(part) for name, part in (("", PAIRS), ("@a", PAIRS[:2]), ("@b", PAIRS[2:]))}
    expected = {f"{metric}{name}": value for name, part in alone.items() for metric, value in part.items()}
    assert evaluated({"a": PAIRS[:2], "b": PAIRS[2:]}) == pytest.approx(expected, abs=1e-6)
    assert expected["eval/losses/total_loss@a"] != expected["eval/losses/total_loss@b"]
    with pytest.raises(DataError, match=r"^eval_preferences\['b'\]\[0\] is a str"):
        evaluated({"a": PAIRS, "b": ["x"]})
    with pytest.raises(DataError, match="^eval_preferences is an empty dict"):
        evaluated({})


@pytest.mark.parametrize("pad", [True, False])
def test_it_learns_an_order(pad: bool, tmp_path: Path) -> None:
    """More a's are better; 30 steps are enough to see it on words that were not trained on. Also where EOS pads."""
    generator = torch.Generator().manual_seed(0)

    def word() -> str:
        return "".join("ab"[int(n)] for n in torch.randint(0, 2, (6,), generator=generator))

    pairs = [(word(), word()) for _ in range(300)]
    ordered = [sorted(pair, key=lambda text: text.count("a")) for pair in pairs]
    data = [{"prompt": "z", "chosen": b, "rejected": a} for a, b in ordered if a.count("a") != b.count("a")]
    trainer = make(
        "RewardTrainer",
        tmp_path,
        preferences=data[:160],
        eval_preferences=data[160:],
        **{"train.batch_size": 16, "train.epochs": 3, "optimizer.kwargs": {"lr": 1e-2}},
        **{"tokenizer.tokenizer_path": tiny_tokenizer(pad=pad)},
    )
    trainer.learn()
    assert trainer.last_metrics["eval/rewards/accuracies"] > 0.9 > 0.7 > rows(tmp_path)[0]["eval/rewards/accuracies"]


def test_messages(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(CHATML)
    row = {"chosen": [user("a"), assistant("b")], "rejected": [user("a"), assistant("c")]}
    changes = {"model.model_path": tiny_config(vocabulary=len(tokenizer)), "tokenizer.tokenizer_path": tokenizer}
    trainer = make("RewardTrainer", tmp_path, preferences=[row], eval_preferences=None, **changes)
    assert tokenizer.decode(trainer.pairs[0].chosen) == "<|user|>a<eos> <|assistant|>b<eos>"


def test_an_adapter_with_a_head(tmp_path: Path) -> None:
    """Only these are trained; merged they are a plain reward model, alone they sit beside a policy's own adapter."""
    base = save_tiny(tmp_path / "base", "llama")
    lora: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 64, "target_modules": ["q_proj", "v_proj"]}
    changes = {"model.model_path": base, "tokenizer.tokenizer_path": None, "model.peft_config": lora}
    trainer = make("RewardTrainer", tmp_path / "run", **changes, **{"train.total_steps": 4})
    trainer.learn()
    trained = {name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad}
    assert trained and all("lora_" in name or ".score." in name for name in trained)
    assert any(".score." in name for name in trained)
    trainer.save_pretrained(tmp_path / "whole")
    trainer.save_pretrained(tmp_path / "adapter", merged=False)
    assert not (tmp_path / "adapter" / "config.json").exists()

    trainer.model.eval()
    pair = trainer.pairs[0]
    with torch.no_grad():
        expected = float(trainer.model(pair.chosen[None], pair.chosen_mask[None]))
    whole = RewardModel(tmp_path / "whole")
    assert whole(prompts=["the cat"], outputs=[" sat."]) == pytest.approx([expected], abs=1e-5)
    policy = AutoModelForCausalLM.from_pretrained(base)
    policy.add_adapter(LoraConfig(**{**lora, "init_lora_weights": False}), adapter_name="default")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(policy)
    model.add_and_load_reward_modeling_adapter(tmp_path / "adapter")
    assert float(model.compute_reward_score(pair.chosen[None])) == pytest.approx(expected, abs=1e-5)


def test_a_loaded_model_is_trained_itself(tmp_path: Path) -> None:
    model: Any = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1))
    before = model.score.weight.clone()
    trainer = make("RewardTrainer", tmp_path, **{"model.model_path": model, "train.total_steps": 1})
    trainer.learn()
    assert trainer.model.lm is model and not torch.equal(model.score.weight, before)


LONG = [("abcdef", "b", "c"), ("a", "bcdefgh", "c")]


def test_long_rows_are_dropped_or_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def kept(**method: Any) -> list[tuple[int, int]]:
        longest = {"train.seq_length": method.pop("longest", 20)}
        changes = {f"method.{name}": value for name, value in method.items()} | longest
        trainer = make(
            "RewardTrainer",
            tmp_path,
            preferences=[*LONG, ("a", "b", "c")],
            eval_preferences=[("a", "b", "c")],
            **changes,
        )
        return [(len(pair.chosen), len(pair.rejected)) for pair in trainer.pairs]

    with caplog.at_level(logging.WARNING, "trlx_like"):
        assert kept() == [(8, 8), (9, 3), (3, 3)]
        assert not caplog.records
        assert kept(longest=8) == [(8, 8), (3, 3)]
        assert kept(longest=6, too_long="truncate") == [(6, 6), (6, 3), (3, 3)]
        assert kept(longest=8, max_prompt_length=2) == [(4, 4), (3, 3)]
    limits = "max_length (8 tokens) or max_prompt_length (2)"
    assert [record.getMessage() for record in caplog.records] == [
        "1 of 3 preferences are longer than max_length (8 tokens) and were dropped.",
        "2 of 3 preferences are longer than max_length (6 tokens) and were cut: 2 tokens of prompts and 3 tokens of 1 "
        "outputs are lost.",
        f"1 of 3 preferences are longer than {limits} and were dropped.",
        f"1 of 3 preferences are longer than {limits} and were cut: 4 tokens of prompts are lost.",
    ]


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (ConfigError, {"preferences": None}, r"RewardTrainer needs preferences: pass train\(preferences=...\)"),
        (ConfigError, {"reward_fn": count_letters}, "reward_fn: RewardTrainer generates no text to score"),
        (ConfigError, {"metric_fn": lengths}, "metric_fn: RewardTrainer generates no text"),
        (ConfigError, {"train.seq_length": 65}, r"train\.seq_length \(65\) is longer than the 64 positions"),
        (DataError, {"preferences": []}, "preferences is empty"),
        (
            DataError,
            {"preferences": [("a", "b", "c"), ("a", "b", "b")]},
            r"preferences\[1\]: chosen and rejected are the",
        ),
        (DataError, {"eval_preferences": [("a", "b")]}, r"^eval_preferences\[0\] is a tuple"),
    ],
)
def test_bad_input_is_one_line_before_a_model_loads(
    error: type[Exception], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if error is DataError:
        changes = {**changes, "model.model_path": "no/such/model"}
    with pytest.raises(error, match=message) as raised:
        make("RewardTrainer", tmp_path, **changes)
    assert "\n" not in str(raised.value)
