"""Judges that were written for TRL judge after a change of the import, and its other names say what to use."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification

import trlx_like
from tests.contract.recipes import make
from tests.tiny import save_tiny, tiny_config, tiny_tokenizer
from trlx_like import TRLConfig, api
from trlx_like.compat.trl import AllTrueJudge, BaseBinaryJudge, BasePairwiseJudge, BaseRankJudge
from trlx_like.config.elsewhere import answers
from trlx_like.errors import ConfigError, RegistryError, RewardError
from trlx_like.rewards.judging import judged


class Longer(BasePairwiseJudge):
    def judge(self, prompts: list[str], completions: list[Any], shuffle_order: bool = True) -> list[int]:
        return [-1 if len(a) == len(b) else int(len(b) > len(a)) for a, b in completions]


class Ordered(BaseRankJudge):
    """The longest first: TRL's rank judges give the numbers of the completions in the order of their places."""

    def judge(self, prompts: list[str], completions: list[Any], shuffle_order: bool = True) -> list[list[int]]:
        return [sorted(range(len(row)), key=lambda n: -len(row[n])) for row in completions]


class Has(BaseBinaryJudge):
    def __init__(self, letter: str) -> None:
        self.letter = letter

    def judge(self, prompts: list[str], completions: list[Any], shuffle_order: bool = True) -> list[int]:
        return [int(self.letter in text) if text else -1 for text in completions]


class Graded(BaseBinaryJudge):
    def judge(self, prompts: list[str], completions: list[Any], shuffle_order: bool = True) -> list[int]:
        return [7 for _ in completions]


def test_the_answers_of_trl_become_scores() -> None:
    groups = [["a", "bbb", "cc"], ["x", "y", "zz"]]
    # By hand: "a" < "cc" < "bbb"; "x" and "y" tie (-1), and "zz" beats both.
    assert judged(Longer(), ["p", "q"], groups) == [[0, 1, 0.5], [0.25, 0.25, 1]]
    # Of "x" and "y", which are as long, the first is placed first.
    assert judged(Ordered(), ["p", "q"], groups) == [[0, 1, 0.5], [0.5, 0, 1]]
    assert judged(Has("a"), ["p"], [["ab", "b", ""]]) == [[1, 0, None]]


def test_all_judges_have_to_say_yes() -> None:
    judge = AllTrueJudge([Has("a"), Has("b")])
    with pytest.raises(RewardError, match="Graded.check returned 7; it must be True, False or None"):
        judged(Graded(), ["p"], [["a"]])
    # Both; one; none; nobody can tell.
    assert judge.judge(["p"] * 4, ["ab", "a", "c", ""]) == [1, 0, 0, -1]
    assert judged(judge, ["p"], [["ab", "a", "c", ""]]) == [[1, 0, 0, None]]


@pytest.mark.parametrize("judge", [Longer(), Ordered(), AllTrueJudge([Has("a")])])
def test_they_train(judge: Any, tmp_path: Path) -> None:
    trainer = make("OnlineDPOTrainer", tmp_path, judge=judge, reward_fn=None, **{"train.total_steps": 1})
    trainer.learn()
    assert trainer.progress.step == 1 and "losses/total_loss" in trainer.last_metrics


def test_what_it_does_not_have_says_what_to_use() -> None:
    module = importlib.import_module("trlx_like.compat.trl")
    for name, words in answers("trl").items():
        with pytest.raises(ImportError, match=rf"^trlx_like.compat.trl has no {name}; use {re.escape(words)}"):
            getattr(module, name)
        for preset in re.findall(r"default_\w+", words):
            assert hasattr(trlx_like, preset)
    with pytest.raises(AttributeError):
        _ = module.nothing
    with pytest.raises(RegistryError, match=r"'pair_rm' is not available: .* \{name: reward_model, model: FOLDER\}"):
        trlx_like.train(judge="pair_rm", prompts=["a"])


def test_a_reward_function_of_trl(here: Path) -> None:
    seen: list[tuple[list[Any], list[Any]]] = []

    def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        seen.append((prompts, completions))
        assert kwargs["outputs"] == completions
        return [float(len(text)) for text in completions]

    def short(completions: list[str]) -> list[float]:
        return [float(len(text)) for text in completions]

    def tokens(completion_ids: list[list[int]], completions: list[Any], prompts: list[Any]) -> list[float]:
        seen.append((prompts, completions))
        return [float(len(ids)) for ids in completion_ids]

    model = save_tiny(here / "model")
    config = trlx_like.default_online_dpo_config().evolve(
        model={"model_path": model},
        train={"seq_length": 24, "total_steps": 1, "batch_size": 2, "checkpoint_dir": str(here / "run")},
        method={"gen_kwargs": {"max_new_tokens": 4}},
    )
    config = TRLConfig.update(config, {"reward": {"weights": [1.0, 2.0]}})
    trlx_like.train(config, [reward, short], prompts=["ab", "c"])
    assert {prompt for prompts, _ in seen for prompt in prompts} == {"ab", "c"}
    seen.clear()
    config = config.evolve(reward={"weights": None}, tokenizer={"chat_template": "{{ messages[0]['content'] }}"})
    asked, told = [{"role": "user", "content": "ab"}], [{"role": "assistant", "content": "b"}]
    trlx_like.train(config, tokens, prompts=[asked, {"prompt": "c", "messages": told}], eval_prompts=[asked])
    pairs = [pair for prompts, completions in seen for pair in zip(prompts, completions, strict=True)]
    assert any(one == asked for one, _ in pairs) and any(one == "c" for one, _ in pairs)
    assert all(isinstance(said, str) if one == "c" else said[0]["role"] == "assistant" for one, said in pairs)


def test_data_that_is_read_once_is_read_at_the_start(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def rows() -> Iterator[dict[str, str]]:
        yield from ({"text": text} for text in ("ab cd", "the cat sat"))

    trainer = make("SFTTrainer", tmp_path, samples=datasets.IterableDataset.from_generator(rows))
    assert len(trainer.dialogues) == 2
    assert len(make("OnlineDPOTrainer", tmp_path, prompts=(text for text in "abc")).prompts.pipeline) == 3


@pytest.mark.parametrize("name", ["RewardTrainer", "SFTTrainer"])
def test_what_is_no_model_of_transformers(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match="model.model_path: must be a folder, a hub name, .* or a loaded model, got Li"
    ):
        make(name, tmp_path, **{"model.model_path": torch.nn.Linear(2, 2)})


def test_a_processor_is_no_tokenizer(tmp_path: Path) -> None:
    processor = type("Processor", (), {"tokenizer": tiny_tokenizer()})()
    with pytest.raises(ConfigError, match=r"^tokenizer \(Processor\) is a processor, and models of text alone are tr"):
        make("OnlineDPOTrainer", tmp_path, tokenizer=processor)


def test_unknown_options_of_trl() -> None:
    for name, section in (("use_transformers_paged", "method"), ("hub_model_id", "train")):
        with pytest.raises(ConfigError, match=rf"^{section}.{name}: unknown key"):
            trlx_like.default_online_dpo_config().evolve(**{section: {name: True}})


@pytest.mark.parametrize("judged_by", ["reward", "judge"])
def test_the_script_of_the_page(judged_by: str, here: Path) -> None:
    """Its YAML, on a tiny model, with the changes that its comments name."""
    model = save_tiny(here / "model")
    scorer: Any = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1))
    scorer.save_pretrained(here / "scorer")
    tiny_tokenizer().save_pretrained(here / "scorer")
    posts = [{"prompt": f"{'a post ' * 9}tldr {n}", "completion": "x"} for n in ("a", "b", "c")]
    (here / "posts.jsonl").write_text("".join(f"{json.dumps(post)}\n" for post in posts))
    small = {"total_steps": 2, "batch_size": 2, "minibatch_size": 2, "seq_length": 60, "checkpoint_dir": here / "run"}
    changes = [f"train.{name}={value}" for name, value in small.items()]
    changes += [f"model.model_path={model}", f"data.prompts={here / 'posts.jsonl'}"]
    given = {"reward": f"data.reward_fn={here / 'scorer'}", "judge": "data.reward_fn=null"}
    changes += [given[judged_by], *[f"data.judge={here / 'scorer'}"] * (judged_by == "judge")]
    config = api.read_config(Path(__file__).parents[2] / "configs" / "online_dpo_tldr.yml", overrides=changes)
    trainer: Any = api.make_trainer(config)
    trainer.learn()
    assert trainer.progress.step == 2
    texts = trainer.decode([torch.tensor(ids) for ids in trainer.prompts.pipeline.ids])
    assert [text[-4:] for text in texts] == ["dr a", "dr b", "dr c"]  # 7 of 60 tokens are left; the end is kept
