"""OnlineDPOTrainer: its pairs, its losses and metrics against plain transformers, and rounds without a pair."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import GENERATION, PROMPTS, Longest, count_letters, make
from tests.contract.runs import rows
from tests.tiny import tiny_config, tiny_tokenizer
from tests.unit.models.test_reward_model import sharp
from trlx_like.config.methods.online_dpo import OnlineDPOConfig
from trlx_like.errors import ConfigError, RewardError
from trlx_like.models.policy import PolicyOutput
from trlx_like.rewards.judges import RewardJudge
from trlx_like.trainers.online_dpo import JudgedPair, OnlineDPOTrainer

TEMPERATURE = GENERATION["temperature"]


class Scripted:
    """A reward function that says the next of given scores, and keeps the outputs it was called with."""

    def __init__(self, *scores: float | None) -> None:
        self.scores = list(scores)
        self.outputs: list[str] = []

    def __call__(self, outputs: list[str], **_: Any) -> list[float | None]:
        self.outputs += outputs
        given, self.scores = self.scores[: len(outputs)], self.scores[len(outputs) :]
        return given


def constant(outputs: Sequence[str], **_: Any) -> list[float]:
    return [1.0] * len(outputs)


def scripted(folder: Path, size: int, *scores: float | None, **changes: Any) -> tuple[Any, Scripted, dict[str, float]]:
    """A trainer that has made one round in which `size` responses a prompt had these scores, and its metrics."""
    reward = Scripted(*scores)
    options = {
        "method.n_generations_per_prompt": size,
        "method.num_prompts": len(scores) // size,
        "train.batch_size": 1,
    }
    trainer = make("OnlineDPOTrainer", folder, reward_fn=reward, **{**options, **changes})
    made = trainer.make_experience()
    return trainer, reward, {**made, **trainer.rollouts.metrics()}


def texts(trainer: OnlineDPOTrainer) -> list[tuple[str, str]]:
    decode = trainer.tokenizer.decode
    return [
        (decode(e.chosen, skip_special_tokens=True), decode(e.rejected, skip_special_tokens=True))
        for e in trainer.store.elements
    ]


# Pairs.


def test_the_best_and_the_worst_of_a_prompt_are_a_pair(tmp_path: Path) -> None:
    """Of 2, 5, -1, 5 the second and the third; of 0, None, 3, None the third and the first; the others are no pairs."""
    scores = [2, 5, -1, 5, 0, None, 3, None, 4, 4, None, 4, None, 9, None, None]
    trainer, reward, metrics = scripted(tmp_path, 4, *scores)
    assert texts(trainer) == [(reward.outputs[1], reward.outputs[2]), (reward.outputs[6], reward.outputs[4])]
    assert [element.scores.tolist() for element in trainer.store.elements] == [[5, -1], [3, 0]]
    assert (metrics["rollout/pairs"], metrics["rollout/ties"], metrics["rollout/unjudged"]) == (2, 1, 1)
    known = [score for score in scores if score is not None]  # 2 5 -1 5 0 3 4 4 4 9: 35 / 10
    assert metrics["rollout/score_mean"] == pytest.approx(3.5) == pytest.approx(sum(known) / len(known))
    assert metrics["rollout/score_std"] == pytest.approx(math.sqrt(sum((s - 3.5) ** 2 for s in known) / 9))


def test_all_responses_to_a_prompt_are_judged_at_once_whatever_the_chunks(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Seeing(Longest):
        def compare(self, pairs: Sequence[tuple[str, str]], prompts: Any = (), **_: Any) -> list[int | None]:
            seen.append(list(prompts))
            return super().compare(pairs)

    options = {"method.n_generations_per_prompt": 3, "method.num_prompts": 5, "method.chunk_size": 2}
    trainer = make("OnlineDPOTrainer", tmp_path, reward_fn=None, judge=Seeing(), **options)
    trainer.make_experience()
    assert [len(prompts) for prompts in seen] == [6, 6, 3]  # three comparisons a prompt
    assert all(prompts[i] == prompts[i + 1] == prompts[i + 2] for prompts in seen for i in range(0, len(prompts), 3))
    assert {p for prompts in seen for p in prompts} == set(PROMPTS)


def test_a_judge_made_of_a_reward_function_makes_the_same_pairs(tmp_path: Path) -> None:
    made = []
    judged: dict[str, Any] = {"reward_fn": None, "judge": RewardJudge(count_letters)}
    for number, given in enumerate(({"reward_fn": count_letters}, judged)):
        trainer = make("OnlineDPOTrainer", tmp_path / str(number), **given)
        trainer.make_experience()
        made.append(texts(trainer))
    assert made[0] == made[1] and len(made[0]) > 2


def test_a_response_without_an_end_pays_a_penalty(tmp_path: Path) -> None:
    """At most one token of 32 ends a response here: with a penalty above the scores, those that end win."""
    scores = [1.0, 2.0] * 40
    kwargs = {**GENERATION, "max_new_tokens": 4}
    trainer, _, metrics = scripted(
        tmp_path, 2, *scores, **{"method.missing_eos_penalty": 10, "method.gen_kwargs": kwargs}
    )
    assert 0 < metrics["rollout/finished_fraction"] < 1
    seen = {(tuple(e.finished.tolist()), tuple(e.scores.tolist())) for e in trainer.store.elements}
    assert seen <= {((1, 1), (2, 1)), ((0, 0), (-8, -9)), ((1, 0), (2, -9)), ((1, 0), (1, -8))}
    assert ((1, 0), (1, -8)) in seen  # the second has the higher reward
    assert metrics["rollout/score_mean"] == 1.5  # as the reward function gave them


def test_rounds_of_ties_pass_without_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No store is waited for: three rounds, five prompts each, and the run is over."""
    calls: list[int] = []

    def tie(outputs: list[str], **_: Any) -> list[float]:
        calls.append(len(outputs))
        return constant(outputs)

    options = {"train.epochs": 3, "method.num_prompts": 5, "method.chunk_size": 5, "eval_prompts": PROMPTS[:1]}
    trainer = make("OnlineDPOTrainer", tmp_path, reward_fn=tie, **options)
    with caplog.at_level(logging.WARNING, "trlx_like"):
        trainer.learn()
    assert trainer.progress.step == 0 and trainer.progress.round == 3
    assert calls.count(15) == 3
    assert caplog.text.count("Nothing of this round can be learned from") == 1  # not for each


def test_a_run_that_ends_in_ties_ends_as_any_other(tmp_path: Path) -> None:
    """Rounds one has pairs, two has none: the run is evaluated and saved where it stands."""
    calls: list[int] = []

    def first_only(outputs: list[str], **_: Any) -> list[float]:
        calls.append(len(outputs))
        return [float(i) for i in range(len(outputs))] if len(calls) == 1 else constant(outputs)

    options = {"train.epochs": 2, "method.num_prompts": 3, "method.chunk_size": 5, "judge": first_only}
    trainer = make("OnlineDPOTrainer", tmp_path, **options)
    metrics = trainer.learn()
    assert (trainer.progress.step, trainer.progress.round) == (1, 2)
    assert [row["step"] for row in rows(tmp_path) if "reward/mean" in row] == [0, 1]
    assert (tmp_path / "checkpoint_001").is_dir() and metrics["rollout/pairs"] == 0


def test_a_round_that_nobody_judges_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"abstained \(None\) from all 4 samples"):
        scripted(tmp_path, 2, None, None, None, None)


# The loss and its metrics.


def logprobs_of(lm: Any, prompt: torch.Tensor, response: torch.Tensor) -> list[float]:
    """Of each token, by plain transformers on one unpadded row, in float64."""
    with torch.no_grad():
        logits = lm.eval()(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
    table = (logits.double() / TEMPERATURE).log_softmax(dim=-1)
    return [float(table[place, token]) for place, token in enumerate(response.tolist())]


def expected(trainer: Any, elements: Sequence[JudgedPair], reference: Any, beta: float) -> dict[str, float]:
    """Every metric of TRL's page, from its formula, over the tokens of these pairs and nothing else."""
    sums: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        sums.setdefault(name, []).append(value)

    for e in elements:
        lp = [logprobs_of(trainer.model.lm, e.prompt, response) for response in (e.chosen, e.rejected)]
        ref = [logprobs_of(reference, e.prompt, response) for response in (e.chosen, e.rejected)]
        chosen, rejected = (sum(own) - sum(other) for own, other in zip(lp, ref, strict=True))
        assert e.scores is not None and e.finished is not None
        for own, other, score, finished in zip(lp, ref, e.scores.tolist(), e.finished.tolist(), strict=True):
            kl = sum(own) - sum(other)
            add("objective/kl", kl)
            add("objective/entropy", -sum(own))
            add("objective/non_score_reward", -beta * kl)
            add("objective/scores", score)
            add("objective/rlhf_reward", score - beta * kl)
            add("val/contain_eos_token", finished)
            add("policy/kl", sum(math.exp(b - a) - 1 + a - b for a, b in zip(own, other, strict=True)))
        add("objective/scores_margin", float(e.scores[0] - e.scores[1]))
        add("rewards/chosen", beta * chosen)
        add("rewards/rejected", beta * rejected)
        add("rewards/margins", beta * (chosen - rejected))
        add("rewards/accuracies", float(chosen > rejected))
        add("logps/chosen", sum(lp[0]))
        add("logps/rejected", sum(lp[1]))
        add("sigmoid", math.log1p(math.exp(-beta * (chosen - rejected))))
        add("ipo", (chosen - rejected - 1 / (2 * beta)) ** 2)
    tokens = sum(len(e.chosen) + len(e.rejected) for e in elements)
    means = {name: sum(values) / len(values) for name, values in sums.items()} | {"beta": beta}
    per_token = {"policy/kl_per_token": "policy/kl", "policy/entropy": "objective/entropy"}
    return means | {name: sum(sums[of_responses]) / tokens for name, of_responses in per_token.items()}


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_losses_and_metrics_by_hand(loss: str, tmp_path: Path) -> None:
    """After the policy has moved, on responses of different lengths, cut into micro-batches."""
    changes = {"method.loss_type": loss, "train.batch_size": 7, "train.minibatch_size": 1, "train.max_grad_norm": None}
    trainer = make("OnlineDPOTrainer", tmp_path, **changes)
    trainer.make_experience()
    elements = trainer.store.elements
    assert len(elements) > 3 and len({len(e.chosen) for e in elements} | {len(e.rejected) for e in elements}) > 2
    (reference,) = trainer.model.reference_modules()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.lm.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    wanted = expected(trainer, elements, reference, 0.5)
    got = trainer.optimize(JudgedPair.collate(elements))
    assert got.pop("losses/total_loss") == pytest.approx(wanted[loss], rel=1e-4)
    for name in ("sigmoid", "ipo"):
        wanted.pop(name)
    assert {name: got[name] for name in wanted} == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    assert set(got) == set(wanted) | {"grad_norm", "learning_rate"}
    assert abs(wanted["objective/kl"]) > 0.05


def test_numbers_worked_by_hand(tmp_path: Path) -> None:
    """Beta .5. Log-ratios of the two pairs: (.4, -.2) and (-1, 1), so margins of .3 and -1.

    kl = (.4 - .2 - 1 + 1) / 4 = .05; scores (3 + 1 + 2 + 0) / 4 = 1.5; rlhf_reward = 1.5 - .5 * .05 = 1.475.
    Losses ln(1 + e^-.3) = .554355 and ln(1 + e^1) = 1.313262. Padding holds numbers that would show.
    """
    trainer = make("OnlineDPOTrainer", tmp_path)
    ids, real = torch.ones(2, 2, dtype=torch.int64), torch.tensor([[True, True], [True, False]])
    batch = JudgedPair(
        ids,
        torch.ones(2, 2).bool(),
        ids,
        real,
        ids,
        real,
        scores=torch.tensor([[3.0, 1], [2, 0]]),
        finished=ids[:, :2] * 1.0,
    )
    bad = float("nan")
    policy = torch.tensor([[-1.0, -0.6], [-2.0, bad], [-1.0, -1.2], [-1.0, bad]])
    reference = torch.tensor([[-1.0, -1.0], [-1.0, bad], [-1.0, -1.0], [-2.0, bad]])

    output = trainer.loss_of(batch, PolicyOutput(logprobs=policy, states=policy, ref_logprobs=reference))
    assert float(output.loss) == pytest.approx(0.554355 + 1.313262, abs=1e-5)
    assert trainer.units(batch) == {"pairs": 2, "tokens": 6}
    terms = {name: value for name, value in output.metrics.items() if isinstance(value, tuple)}
    means = {name: float(value) / 2 for name, value in output.metrics.items() if not isinstance(value, tuple)}
    k3 = [math.exp(-0.4) - 0.6, math.exp(0.2) - 1.2, math.e - 2, math.exp(-1)]
    assert means == pytest.approx(
        {
            "objective/kl": 0.05,
            "objective/entropy": (1.6 + 2 + 2.2 + 1) / 4,
            "objective/non_score_reward": -0.025,
            "objective/rlhf_reward": 1.475,
            "objective/scores": 1.5,
            "objective/scores_margin": 2,
            "policy/kl": sum(k3) / 4,
            "rewards/chosen": (0.2 - 0.5) / 2,
            "rewards/rejected": (-0.1 + 0.5) / 2,
            "rewards/margins": -0.35,
            "rewards/accuracies": 0.5,
            "logps/chosen": (-1.6 - 2) / 2,
            "logps/rejected": (-2.2 - 1) / 2,
            "val/contain_eos_token": 1,
            "beta": 0.5,
        },
        abs=1e-6,
    )
    assert {unit for _, unit in terms.values()} == {"tokens"}
    sums = {"policy/kl_per_token": sum(k3), "policy/entropy": 1.6 + 2 + 2.2 + 1}
    assert {name: float(value) for name, (value, _) in terms.items()} == pytest.approx(sums, abs=1e-6)


@pytest.mark.parametrize(
    "change", [{}, {"model.num_layers_unfrozen": 1}, {"model.peft_config": {"peft_type": "LORA", "r": 2}}]
)
def test_the_reference_is_the_policy_at_the_start(change: dict[str, Any], tmp_path: Path) -> None:
    """Every margin is 0, the loss that of a coin, and the divergence 0 exactly."""
    trainer = make("OnlineDPOTrainer", tmp_path, **change)
    trainer.make_experience()
    metrics = trainer.optimize(JudgedPair.collate(trainer.store.elements))
    assert metrics["objective/kl"] == metrics["policy/kl"] == metrics["rewards/margins"] == 0
    assert metrics["losses/total_loss"] == pytest.approx(math.log(2))
    assert trainer.optimize(JudgedPair.collate(trainer.store.elements))["policy/kl"] > 0


def test_a_beta_for_each_pass_over_the_prompts(tmp_path: Path) -> None:
    """Five prompts, two a round: the first pass begins rounds 1 to 3, the second 4 and 5, the third 6 and so on."""
    options = {"method.beta": [0.5, 0.25, 0.125], "method.num_prompts": 2, "train.batch_size": 2, "train.epochs": 11}
    trainer = make("OnlineDPOTrainer", tmp_path, **options)
    betas = []
    for _ in range(11):
        trainer.store.clear()
        trainer.make_experience()
        betas.append(trainer.beta)
    assert betas == [0.5] * 3 + [0.25] * 2 + [0.125] * 6
    elements = trainer.store.elements
    assert not elements or trainer.optimize(JudgedPair.collate(elements))["beta"] == 0.125


# Evaluation.


def test_the_win_rate_is_the_judges(tmp_path: Path) -> None:
    """Against the empty text, another, and one that nothing is longer than."""
    prompts = [{"prompt": p, "reference": r} for p, r in zip(PROMPTS, ["", "abc", "z" * 99, "a", ""], strict=True)]
    options = {"train.total_steps": 1, "train.eval_interval": 1}
    make("OnlineDPOTrainer", tmp_path, reward_fn=None, judge=Longest(), eval_prompts=prompts, **options).learn()
    table = [row for row in rows(tmp_path, "samples.jsonl") if row["step"] == 0]
    for row, prompt in zip(table, prompts, strict=True):
        own, other = len(row["output"]), len(prompt["reference"])
        assert row["metrics/win_rate"] == (0.5 if own == other else float(own > other))
        assert "metrics/length" in row  # the metric function of the run is asked as well
    first, *_, last = rows(tmp_path)
    assert first["metrics/win_rate"] == sum(row["metrics/win_rate"] for row in table) / 5
    assert "metrics/win_rate" in last
    assert "reward/mean" not in first  # a judge has no scale


def test_without_references_there_is_no_win_rate(tmp_path: Path) -> None:
    trainer = make("OnlineDPOTrainer", tmp_path, **{"train.total_steps": 1})
    assert "metrics/win_rate" not in trainer.learn()
    assert "reward/mean" in trainer.last_metrics


# Options.


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("beta", [], "method.beta: must be a number above 0, or a list of them"),
        ("beta", [0.1, 0], "method.beta: must be a number above 0"),
        ("n_generations_per_prompt", 1, "method.n_generations_per_prompt: must be a whole number of at least 2"),
        ("loss_type", "hinge", "method.loss_type: must be 'sigmoid' or 'ipo'"),
        ("num_prompts", 2, r"method.num_prompts: 2 is less than a step's train.batch_size \(3\)"),
        ("gen_kwargs", {"max_new_tokens": 4, "num_beams": 2}, "method.gen_kwargs.num_beams: 2 samples text in a way"),
        (
            "gen_kwargs",
            {"max_new_tokens": 4, "repetition_penalty": 1.1},
            "repetition_penalty: 1.1 samples text in a way",
        ),
        ("gen_kwargs", {"max_new_tokens": 4, "do_sample": False}, "do_sample: false samples text in a way"),
    ],
)
def test_bad_options_are_refused(option: str, value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        make("OnlineDPOTrainer", tmp_path, **{f"method.{option}": value})


def test_someone_has_to_judge(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"needs reward_fn or judge: pass train\(reward_fn=...\) or train\(judge=...\)"
    ):
        make("OnlineDPOTrainer", tmp_path, reward_fn=None)
    with pytest.raises(ConfigError, match="PPOTrainer cannot use judge; it takes eval_prompts, prompts"):
        make("PPOTrainer", tmp_path, judge=Longest())
    with pytest.raises(ConfigError, match="SFTTrainer cannot use judge"):
        make("SFTTrainer", tmp_path, **{"data.judge": "reward_model"})


def test_a_judge_by_its_place(tmp_path: Path) -> None:
    trainer = make("OnlineDPOTrainer", tmp_path, reward_fn=None, **{"data.judge": "tests.contract.recipes:Longest"})
    assert isinstance(trainer.judge, Longest)


def test_a_reward_model_by_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "reward"
    sharp(tiny_config()).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    trainer = make("OnlineDPOTrainer", tmp_path / "run", reward_fn=None, **{"data.judge": str(folder)})
    trainer.make_experience()
    model = trainer.judge.reward_fn
    for element in trainer.store.elements:
        outputs = trainer.decode([element.chosen, element.rejected])
        chosen, rejected = model(prompts=trainer.decode([element.prompt] * 2), outputs=outputs)
        assert chosen > rejected
    with pytest.raises(ConfigError, match=r"data.judge .* cannot be loaded as a reward model"):
        make("OnlineDPOTrainer", tmp_path / "run", reward_fn=None, **{"data.judge": str(tmp_path)})


def test_the_options_of_trl() -> None:
    method = OnlineDPOConfig()
    assert (method.beta, method.loss_type, method.missing_eos_penalty, method.disable_dropout) == (
        0.1,
        "sigmoid",
        None,
        True,
    )
    assert method.gen_kwargs == {"max_new_tokens": 64, "temperature": 0.9, "top_k": 0, "top_p": 1.0, "do_sample": True}


def test_options_that_are_not_named_keep_their_defaults() -> None:
    named = OnlineDPOConfig(gen_kwargs={"max_new_tokens": 24}, gen_experience_kwargs={"temperature": 0.5})
    assert named.gen_kwargs["max_new_tokens"] == 24 and named.gen_kwargs["temperature"] == 0.9
    assert named.experience_kwargs["max_new_tokens"] == 64 and named.experience_kwargs["temperature"] == 0.5
    assert OnlineDPOConfig().gen_experience_kwargs is None
