"""ILQL: its loss against numbers and loops of its own, target synchronisation, data, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.contract.recipes import make
from tests.unit.functional import q_learning_numpy as reference
from trlx_like.errors import ConfigError, DataError
from trlx_like.models.layout import run_base
from trlx_like.pipelines import given, prepared
from trlx_like.pipelines.forms import reward_of

PLAIN = {"method.standardize_rewards": False}


def expected_terms(trainer: Any, samples: list[tuple[list[int], list[bool], list[float]]]) -> dict[str, float]:
    """The four terms summed over all actions, from unpadded rows one at a time, in float64 and loops."""
    method, heads, lm = trainer.method, trainer.values, trainer.model.lm
    terms = dict.fromkeys(("q", "v", "cql", "awac"), 0.0)
    for ids, is_output, rewards in samples:
        with torch.no_grad():
            hidden = run_base(lm, {"input_ids": torch.tensor([ids])})[0][0]
            logits = lm(input_ids=torch.tensor([ids])).logits[0].double().numpy()
            v = heads.value(hidden).double().numpy()
            qs = [q(hidden).double().numpy() for q in heads.qs]
            targets = [target(hidden).double().numpy() for target in heads.targets]
        actions = [t for t in range(1, len(ids)) if is_output[t]]
        returns = 0.0
        for t, following in reversed(list(zip(actions, [*actions[1:], None], strict=True))):
            token, state = ids[t], t - 1
            y = rewards[t] + (0.0 if following is None else method.gamma * v[following - 1])
            target_q = min(target[state, token] for target in targets)
            returns = rewards[t] + method.gamma * returns
            goal = returns if method.mc_returns else target_q
            terms["q"] += sum((q[state, token] - y) ** 2 for q in qs)
            terms["v"] += abs(method.tau - (goal < v[state])) * (goal - v[state]) ** 2
            terms["cql"] += sum(reference.conservative(q[state], token, method.cql_temperature) for q in qs)
            weight = math.exp(method.beta * (target_q - v[state]))
            logp = logits[state, token] - np.logaddexp.reduce(logits[state])
            terms["awac"] += -logp * min(weight, method.awac_clip or math.inf)
    return terms


ROWS = [
    # the cat| sat.<eos>, and a dialogue of two outputs; ids of the tiny tokenizer, EOS is 0.
    ([2, 3, 4, 5, 6, 0], [False, False, True, True, True, True], [0.0, 0.0, 0.0, 0.0, 0.0, 1.5]),
    ([7, 8, 9, 10, 11, 0], [False, True, True, False, True, True], [0.0, 0.0, -1.0, 0.0, 0.0, 2.0]),
]
SAMPLES = [("ab", "cde"), ("f", "gh", "i", "j")]
REWARDS: list[Any] = [1.5, [-1.0, 2.0]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method.tau": 0.9, "method.gamma": 0.5, "method.cql_temperature": 2.0, "method.beta": 1.0},
        {"method.two_qs": False, "method.beta": 3.0, "method.awac_clip": 1.01},
        {"method.mc_returns": True, "method.gamma": 0.7},
    ],
)
def test_the_loss_is_that_of_single_unpadded_rows(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = make("ILQLTrainer", tmp_path, samples=SAMPLES, rewards=REWARDS, **PLAIN, **options)
    with torch.no_grad():
        for parameter in trainer.values.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    trainer.make_experience()
    batch = trainer.experience_class.collate(trainer.store.elements)
    assert [[int(i) for i in element.response] for element in trainer.store.elements] == [ids[1:] for ids, *_ in ROWS]
    assert trainer.units(batch) == {"actions": 8.0, "tokens": 10.0}
    output = trainer.loss(batch)
    want = expected_terms(trainer, ROWS)
    sums = {name: output.metrics[f"losses/{name}_loss"] for name in want}
    assert {unit for _, unit in sums.values()} == {"actions"}
    got = {name: float(value) for name, (value, _) in sums.items()}
    assert got == pytest.approx(want, rel=1e-4)
    total = want["q"] + want["v"] + trainer.method.cql_scale * want["cql"] + want["awac"]
    assert {unit: float(value) for unit, value in output.sums("actions").items()} == {
        "actions": pytest.approx(total, rel=1e-4)
    }


def test_a_mean_over_all_tokens_has_another_denominator(tmp_path: Path) -> None:
    """8 actions among 10 tokens that have one before them: the imitation term is 8/10 of that per action."""
    values = []
    for per in ("action", "token"):
        changes = {**PLAIN, "method.awac_per": per}
        trainer = make("ILQLTrainer", tmp_path / per, samples=SAMPLES, rewards=REWARDS, **changes)
        trainer.make_experience()
        batch = trainer.experience_class.collate(trainer.store.elements)
        values.append(trainer.optimisation.measure([batch], trainer.loss, trainer.units)["losses/awac_loss"])
    assert values[1] == pytest.approx(0.8 * values[0])


@pytest.mark.parametrize(("option", "head"), [("detach_q", "qs"), ("detach_v", "value")])
def test_detached_heads_learn_and_leave_the_model_alone(tmp_path: Path, option: str, head: str) -> None:
    """With everything else switched off, what reaches the language model is what the other head sends."""
    quiet = {"method.awac_scale": 0.0, "method.cql_scale": 0.0, "method.detach_q": True, "method.detach_v": True}
    trainer = make("ILQLTrainer", tmp_path, **quiet)
    trainer.make_experience()
    batch = trainer.experience_class.collate(trainer.store.elements)
    trainer.loss(batch).sums("actions")["actions"].backward()
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.lm.parameters())
    assert all(p.grad is not None and p.grad.any() for p in trainer.values.value.parameters())
    setattr(trainer.method, option, False)
    trainer.loss(batch).sums("actions")["actions"].backward()
    assert any(p.grad is not None and p.grad.any() for p in trainer.model.lm.parameters())


def test_targets_follow_by_optimizer_steps(tmp_path: Path) -> None:
    """Every second of 5 steps, by alpha: t2 = (1-a) t0 + a q2, t4 = (1-a) t2 + a q4, unchanged at 5."""
    changes = {"method.alpha": 0.25, "method.steps_for_target_q_sync": 2, "train.total_steps": 5}
    trainer = make("ILQLTrainer", tmp_path, **changes)
    seen = []
    after_step = trainer.after_step

    def look(metrics: dict[str, float]) -> None:
        after_step(metrics)
        pairs = (trainer.values.qs[1].layers[2].weight, trainer.values.targets[1].layers[2].weight)
        seen.append([value.detach().clone() for value in pairs])

    target = trainer.values.targets[1].layers[2].weight.detach().clone()
    assert torch.equal(target, trainer.values.qs[1].layers[2].weight)
    trainer.after_step = look
    trainer.learn()
    assert len(seen) == 5
    for step, (online, held) in enumerate(seen, start=1):
        if step % 2 == 0:
            target = 0.75 * target + 0.25 * online
        torch.testing.assert_close(held, target)
    assert not any(parameter.requires_grad for parameter in trainer.values.targets.parameters())


def test_trlx_fills_the_store_by_hand(tmp_path: Path) -> None:
    trainer = make("ILQLTrainer", tmp_path, **PLAIN)
    metrics = trainer.make_experience(["abcdef", "b"], [2.0, 4.0], 4)
    assert metrics == {
        "data/samples": 2.0,
        "data/actions": 4.0,  # b c d, and EOS
        "data/return_mean": 3.0,
        "data/return_std": 1.0,
        "data/cut_rows": 1.0,
        "data/cut_outputs": 1.0,
        "data/cut_output_tokens": 3.0,  # e and f, and the EOS behind them
        "data/dropped_rows": 0.0,
    }
    assert [element.rewards.tolist() for element in trainer.store.elements] == [[0, 0, 2], [4]]


def test_rewards_in_rows_are_read_when_the_rows_are_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second start asks the first row alone, whether there are any. What it learns from has the same bits."""
    read: list[Any] = []

    def watched(row: Any) -> Any:
        read.append(row)
        return reward_of(row)

    monkeypatch.setattr(given, "reward_of", watched)
    monkeypatch.setattr(prepared, "FEWEST", 1)
    monkeypatch.setenv(prepared.VARIABLE, str(tmp_path / "cache"))
    rows = [{"prompt": "ab", "output": "cde"[:n], "reward": value} for n, value in enumerate((0.1, [-2.5], 1 / 3), 1)]

    def rewards(rows: Any, given: Any = None, **options: Any) -> list[list[float]]:
        read.clear()
        trainer = make("ILQLTrainer", tmp_path, samples=rows, rewards=given, **options)
        return [trainer.elements[row].rewards.tolist() for row in range(3)]

    listed = rewards(rows, [0.1, [-2.5], 1 / 3])
    assert rewards(rows) == listed and read == [rows[0], *rows]
    assert rewards(rows) == listed and read == rows[:1]
    plain = rewards(rows, **PLAIN)
    assert read == [rows[0], *rows] and plain[1][-1] == -2.5 != listed[1][-1]
    assert rewards([*rows[:2], {**rows[2], "reward": 0.5}], **PLAIN)[2][-1] == 0.5
    for _ in range(2):
        with pytest.raises(DataError, match=r"rewards\[1\] is nan; give a finite number"):
            rewards([rows[0], {**rows[1], "reward": math.nan}, rows[2]])
        with pytest.raises(DataError, match=r"rewards\[2\] is None; give a finite number"):
            rewards([*rows[:2], {"prompt": "ab", "output": "c"}])
        with pytest.raises(DataError, match=r"rewards\[0\] has 2 numbers for a sample of 1 outputs"):
            rewards([{**rows[2], "reward": [1.0, 2.0]}, *rows[1:]])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"rewards": None}, "ILQLTrainer needs rewards: pass train(rewards=...) or set data.rewards."),
        ({"samples": None}, "ILQLTrainer needs samples: pass train(samples=...) or set data.samples."),
        ({"rewards": [1.0]}, "rewards has 1 entries for 5 samples; give one per sample."),
        ({"rewards": [1.0, math.nan, 0, 0, 0]}, "rewards[1] is nan; give a finite number, or a list of them."),
        (
            {"samples": [("abcdefghijklmnopqrstuvwxyz", "a")] * 5},
            "samples[0]: no output is left within train.seq_length (20 tokens); shorten its prompt.",
        ),
        (
            {"sampler.engine": "other"},
            "sampler.engine (other): ILQL decodes with 'transformers' only.",
        ),
        (
            {"method.gen_kwargs": {"max_new_tokens": 3, "bet": 1}},
            "method.gen_kwargs.bet: is not an option of text generation",
        ),
    ],
)
def test_bad_input_is_one_line_before_a_model_is_loaded(
    tmp_path: Path, arguments: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trlx_like.samplers.engines import ENGINES, TransformersEngine
    from trlx_like.trainers import text

    monkeypatch.setattr(ENGINES, "_entries", dict(ENGINES._entries))  # registered for this test alone
    ENGINES.register("other")(TransformersEngine)
    monkeypatch.setattr(text, "load_model", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises((ConfigError, DataError)) as error:
        make("ILQLTrainer", tmp_path, **arguments)
    assert sentence in str(error.value)


def test_an_export_says_how_its_heads_are_read(tmp_path: Path) -> None:
    trainer = make("ILQLTrainer", tmp_path)
    trainer.save_pretrained(tmp_path / "hf")
    text = (tmp_path / "hf" / "README.md").read_text(encoding="utf-8")
    assert "trlx_like.AutoModelForCausalLMWithILQLHeads.from_pretrained" in text
    assert "heads.safetensors" in text


def test_a_trlx_name_is_the_same_trainer() -> None:
    from trlx_like.config import TRAINERS

    assert TRAINERS.get("AccelerateILQLTrainer") is TRAINERS.get("ILQLTrainer")
