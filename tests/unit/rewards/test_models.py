"""Reward models as reward functions: the rewards of training, whatever the batch, and PPO that learns from them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import make
from tests.contract.runs import rows
from tests.tiny import save_tiny, tiny_config, tiny_tokenizer
from tests.unit.models.test_reward_model import sharp
from tests.unit.pipelines.templates import CHATML, assistant, chat_tokenizer, user
from trlx_like.errors import ConfigError
from trlx_like.models.reward_model import RewardNetwork
from trlx_like.pipelines.preferences import encode_preferences
from trlx_like.rewards.models import RewardModel

PROMPTS = ["the cat", "a", "", "zz", "b"]
OUTPUTS = [" sat on a mat.", "b", "abc", "", "b" * 70]


def call(function: Any, prompts: list[str] = PROMPTS, outputs: list[str] = OUTPUTS, **more: Any) -> Any:
    samples = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    return function(samples=samples, prompts=prompts, outputs=outputs, **more)


def network_on(model: Any, *rows_of_ids: list[int]) -> list[float]:
    """Rewards of rows, one at a time."""
    with torch.no_grad():
        return [float(RewardNetwork(model)(torch.tensor([ids]), torch.ones(1, len(ids)).bool())) for ids in rows_of_ids]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_rewards_are_those_of_training(family: str) -> None:
    """Of the same ids that a preference has, whatever the batch; EOS is one of them."""
    model, tokenizer = sharp(tiny_config(family)), tiny_tokenizer()
    pairs = encode_preferences([("the cat", " sat.", " sat on a mat."), ("a", "b", "c")], tokenizer, max_length=64)
    wanted = [[*pair.prompt, *answer] for pair in pairs for answer in (pair.chosen, pair.rejected)]
    prompts, outputs = ["the cat"] * 2 + ["a"] * 2, [" sat.", " sat on a mat.", "b", "c"]
    expected = network_on(model, *wanted)
    for size in (1, 2, 3, 32):
        rewards = call(RewardModel(model, tokenizer, batch_size=size), prompts, outputs)
        assert rewards == pytest.approx(expected, abs=1e-5)
    assert len(set(expected)) == 4
    assert all(type(reward) is float for reward in rewards)


def test_that_texts_lose_their_beginning_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = RewardModel(sharp(tiny_config()), tiny_tokenizer(), max_length=4)
    with caplog.at_level(logging.WARNING, "trlx_like"):
        call(model, ["a", "b"], ["b", "cc"])
        assert not caplog.messages
        for _ in range(2):
            call(model, ["aaab", "a", "aaaa"], ["bc", "b", "b"])
    assert caplog.messages == [
        "2 of 3 texts are longer than the 4 tokens that the reward model reads: these, and others like them, lose "
        "their beginning."
    ]


def test_tools_of_a_prompt_reach_the_template_of_the_reward_model() -> None:
    """The prompts are written as `x` or `y`, and the chat as ChatML writes it: the same ids as of that text."""
    tokenizer = chat_tokenizer("{% for t in tools or [] %}{{ t.name }}{% endfor %}" + CHATML)
    model = sharp(tiny_config(vocabulary=40))
    chats = {"messages": [[user("a")]] * 3, "tools": [[{"name": "x"}], [{"name": "y"}], None]}
    rewards = call(RewardModel(model, tokenizer), ["a"] * 3, ["b"] * 3, **chats)
    ids = [tokenizer(f"{name}<|user|>a<eos> <|assistant|>b<eos>").input_ids for name in ("x", "y", "")]
    assert rewards == pytest.approx(network_on(model, *ids), abs=1e-5)
    assert len(set(rewards)) == 3


def test_long_texts_keep_their_answer() -> None:
    model, tokenizer = sharp(tiny_config()), tiny_tokenizer()
    a, b, c, eos = 2, 3, 4, 0
    assert call(RewardModel(model, tokenizer, max_length=4), ["aaab"], ["bc"]) == pytest.approx(
        network_on(model, [b, b, c, eos]), abs=1e-6
    )
    # By default the model's positions are the limit: 64.
    assert call(RewardModel(model, tokenizer), ["a" * 70], ["bc"]) == pytest.approx(
        network_on(model, [*[a] * 61, b, c, eos]), abs=1e-5
    )


def test_nothing_to_score() -> None:
    assert call(RewardModel(sharp(tiny_config()), tiny_tokenizer()), [], []) == []


def test_it_trains_nothing_and_has_no_dropout() -> None:
    torch.manual_seed(0)
    from transformers import AutoModelForSequenceClassification, GPT2Config

    config = GPT2Config(**{**tiny_config().to_dict(), "num_labels": 1})
    model = RewardModel(AutoModelForSequenceClassification.from_config(config).train(), tiny_tokenizer())
    assert call(model) == call(model)
    assert not any(parameter.requires_grad for parameter in model.network.parameters())


def test_messages_are_written_by_the_template_of_the_reward_model() -> None:
    tokenizer = chat_tokenizer(CHATML)
    model = sharp(tiny_config(vocabulary=len(tokenizer)))
    ids: Any = tokenizer.apply_chat_template([user("a"), assistant("b")], return_dict=False)
    assert tokenizer.decode(ids[-2:]) == "<eos> "  # what follows EOS is no part of an answer
    rewards = call(RewardModel(model, tokenizer), ["user a", "c"], ["b", "d"], messages=[[user("a")], None])
    plain = encode_preferences([("c", "d", "e")], tokenizer, max_length=9)[0]
    assert rewards == pytest.approx(network_on(model, ids[:-1], [*plain.prompt, *plain.chosen]), abs=1e-5)


def test_what_cannot_be_a_reward_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"RewardModel \('.*lm'\) holds GPT2LMHeadModel, which has no trained head"):
        RewardModel(save_tiny(tmp_path / "lm"))
    with pytest.raises(ConfigError, match="RewardModel: there is no tokenizer with the model"):
        RewardModel(sharp(tiny_config()))
    sharp(tiny_config()).save_pretrained(tmp_path / "bare")
    with pytest.raises(ConfigError, match="RewardModel: there is no tokenizer with the model"):
        RewardModel(tmp_path / "bare")


# From pairs to a policy.


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model of a's, from pairs."""
    generator = torch.Generator().manual_seed(0)
    words = ["".join("abcd"[int(n)] for n in torch.randint(0, 4, (5,), generator=generator)) for _ in range(200)]
    ordered = [sorted(pair, key=lambda word: word.count("a")) for pair in zip(words[::2], words[1::2], strict=True)]
    pairs = [("the cat", more, less) for less, more in ordered if less.count("a") < more.count("a")]
    folder = tmp_path_factory.mktemp("reward")
    changes = {
        "train.batch_size": 16,
        "train.epochs": 16,
        "optimizer.kwargs": {"lr": 1e-2},
        "method.center_rewards_coefficient": 0.01,
    }
    trainer = make("RewardTrainer", folder, preferences=pairs, eval_preferences=pairs, **changes)
    trainer.learn()
    assert trainer.last_metrics["eval/rewards/accuracies"] > 0.95
    trainer.save_pretrained(folder / "model")
    return str(folder / "model")


def test_a_policy_learns_from_an_exported_reward_model(exported: str, tmp_path: Path) -> None:
    trainer = make(
        "PPOTrainer",
        tmp_path,
        prompts=["the cat"] * 5,
        reward_fn=RewardModel(exported),
        metric_fn=lambda outputs: {"a": [output.count("a") / 5 for output in outputs]},
        **{
            "method.num_rollouts": 32,
            "method.chunk_size": 32,
            "method.gen_kwargs": {"max_new_tokens": 5, "eos_token_id": 31},
            "method.init_kl_coef": 0.0,
            "train.batch_size": 32,
            "train.epochs": 20,
            "optimizer.kwargs": {"lr": 1e-2},
        },
    )
    trainer.learn()
    first, last = rows(tmp_path)[0], trainer.last_metrics
    best = call(RewardModel(exported), ["the cat"], ["aaaaa"])[0]  # how large rewards are depends on the processor
    assert last["reward/mean"] > first["reward/mean"] + 0.7 * (best - first["reward/mean"])
    assert last["metrics/a"] > first["metrics/a"] + 0.3


def test_a_yaml_names_a_reward_model_by_its_folder(exported: str, tmp_path: Path) -> None:
    trainer = make("PPOTrainer", tmp_path, reward_fn=None, **{"data.reward_fn": exported})
    assert call(trainer.reward_fn) == pytest.approx(call(RewardModel(exported)))
    lm = save_tiny(tmp_path / "lm")
    with pytest.raises(ConfigError, match=r"^data\.reward_fn \('.*lm'\) holds GPT2LMHeadModel"):
        make("PPOTrainer", tmp_path, reward_fn=None, **{"data.reward_fn": lm})
    with pytest.raises(ConfigError, match=r"data\.reward_fn \('nowhere'\) must be module:function"):
        make("PPOTrainer", tmp_path, reward_fn=None, **{"data.reward_fn": "nowhere"})
