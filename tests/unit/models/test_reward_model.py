"""The reward of a sequence does not see padding, is that of the last real token, and survives export."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    PreTrainedModel,
    T5Config,
)

from tests.tiny import FAMILIES, ODD_FAMILIES, save_tiny, tiny_config, tiny_lm, tiny_tokenizer
from trlx_like.config import TokenizerConfig
from trlx_like.errors import ConfigError
from trlx_like.models import shared_prompts
from trlx_like.models.compaction import compaction_of
from trlx_like.models.dropout import disable_dropout
from trlx_like.models.reward_model import RewardNetwork, load_reward_model, with_own_pad_token
from trlx_like.models.tokenizer import load_tokenizer

ROWS = [[5, 6, 7, 8, 0], [9, 3], [4, 0], [1, 5, 1], [7] * 9]
"""Ids, with EOS (0) and the pad id (1) among the real ones."""


def sharp(config: Any, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = load_reward_model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    disable_dropout(model)
    return model


def padded(rows: list[list[int]], side: str, fill: int, extra: int = 0) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows)) + extra
    ids, mask = torch.full((len(rows), width), fill), torch.zeros(len(rows), width, dtype=torch.bool)
    for row, values in enumerate(rows):
        place = slice(width - len(values), width) if side == "left" else slice(0, len(values))
        ids[row, place], mask[row, place] = torch.tensor(values), True
    return ids, mask


# transformers has no classifier for these two.
CLASSIFIERS = [family for family in FAMILIES + ODD_FAMILIES if family not in ("cohere", "granite")]


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_padding_is_silent_and_the_last_token_counts(family: str) -> None:
    network = RewardNetwork(sharp(tiny_config(family)))
    lm: Any = network.lm
    # The model itself on each row alone, where there is no padding to be wrong about: all scores, of them the last.
    with torch.no_grad():
        alone = [float(lm.score(lm.base_model(torch.tensor([row])).last_hidden_state)[0, -1, 0]) for row in ROWS]
        for side in ("left", "right"):
            for fill in (0, 1, 9):
                rewards = network(*padded(ROWS, side, fill, extra=fill % 3))
                assert rewards.tolist() == pytest.approx(alone, abs=2e-5), (side, fill)
    assert rewards.dtype == torch.float32 and len(set(alone)) == len(ROWS)


ALIKE = [[5, 6, 7, 8, 0], [9, 3], [5, 6, 4], [1, 5, 1, 2, 2, 2], [9, 7, 1], [5, 6, 7, 8, 8, 2]]
COMMON = [4, 1, 2, 0, 1, 4]
"""How many tokens each row has in common with another one: the first and the last four."""


@pytest.mark.parametrize("family", CLASSIFIERS)
@pytest.mark.parametrize("share", [False, True])
def test_a_common_beginning_is_read_once(family: str, share: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards and gradients are those of whole sequences, whichever way they are read."""
    monkeypatch.setattr(shared_prompts, "WORTH", 0.0)
    network = RewardNetwork(sharp(tiny_config(family)))
    ids, mask = padded(ALIKE, "right", 0)
    found, made = [], compaction_of(network.lm)
    for compaction in (None, replace(made, longest=0) if share else made):
        network.compaction = compaction
        network.zero_grad()
        assert compaction is None or network._compact(ids, mask, torch.tensor(COMMON)) is not None
        rewards = network(ids, mask, torch.tensor(COMMON))
        rewards.square().sum().backward()
        found.append((rewards.detach(), {name: p.grad for name, p in network.named_parameters()}))
    (whole, gradients), (compact, others) = found
    torch.testing.assert_close(compact, whole, rtol=0, atol=2e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-3, atol=1e-4, msg=name)


def test_tokens_that_a_pair_computes() -> None:
    """Answers of 2 and 1 tokens to a prompt of 9 are 12 tokens in one row, in place of 2 rows of 11."""
    network = RewardNetwork(sharp(tiny_config("llama")))
    network.compaction, read = compaction_of(network.lm), []
    network.lm.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    pair = [[*range(2, 11), 3, 4], [*range(2, 11), 5]]
    with torch.no_grad():
        network(*padded(pair, "right", 0), torch.tensor([9, 9]))
        network(*padded(pair, "right", 0))
        network(*padded([[2, 3, 4], [5, 6, 7]], "right", 0), torch.tensor([0, 0]))  # nothing to save
    assert read == [(1, 12), (2, 11), (2, 3)]


def test_gradients_do_not_see_padding() -> None:
    network = RewardNetwork(sharp(tiny_config("llama")))
    gradients = []
    for side, fill in (("right", 0), ("left", 9)):
        network.zero_grad()
        network(*padded(ROWS, side, fill)).square().sum().backward()
        gradients.append({name: p.grad for name, p in network.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-4, msg=name)


def test_encoders_read_their_first_token() -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes["intermediate_size"] = 32
    model = sharp(BertConfig(vocab_size=32, **sizes))
    network = RewardNetwork(model)
    with torch.no_grad():
        alone = [float(model(torch.tensor([row])).logits) for row in ROWS]
        assert network(*padded(ROWS, "right", 9)).tolist() == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(("unfrozen", "trained"), [(-1, 2), (1, 1), (0, 0), (2, 2), (9, 2)])
def test_only_the_top_and_the_head_are_trained(unfrozen: int, trained: int) -> None:
    network = RewardNetwork(sharp(tiny_config("llama")), unfrozen)
    names = {name for name, parameter in network.named_parameters() if parameter.requires_grad}
    assert "lm.score.weight" in names
    assert {name.split(".")[3] for name in names if ".layers." in name} == {str(n) for n in range(2 - trained, 2)}
    assert ("lm.model.embed_tokens.weight" in names) == (unfrozen == -1)


@pytest.mark.parametrize("pads", ["<pad>", "<eos>", "<bos>"])
def test_an_export_says_the_same_in_plain_transformers(pads: str, tmp_path: Path) -> None:
    given = load_tokenizer(TokenizerConfig(), None, tiny_tokenizer(pad=pads == "<pad>", bos=pads == "<bos>"))
    model = sharp(tiny_config("gpt2", vocabulary=len(given)))
    tokenizer = with_own_pad_token(given, model)
    assert given.padding_side == "left" and given.pad_token == ("<pad>" if pads == "<pad>" else "<eos>")
    assert tokenizer.pad_token == {"<pad>": "<pad>", "<eos>": "<|pad|>", "<bos>": "<bos>"}[pads]
    assert model.config.pad_token_id == tokenizer.pad_token_id < model.config.vocab_size
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    batch = AutoTokenizer.from_pretrained(tmp_path)(["ab c<eos>", "b<eos>", "zebra"], return_tensors="pt", padding=True)
    with torch.no_grad():
        theirs = plain(**batch).logits[:, 0]
        ours = RewardNetwork(model)(batch.input_ids, batch.attention_mask.bool())
    assert theirs.tolist() == pytest.approx(ours.tolist(), abs=1e-5)


def test_a_new_pad_token_keeps_the_rewards() -> None:
    model = sharp(tiny_config("gpt2", vocabulary=len(tiny_tokenizer(pad=False))))
    ids, mask = padded([[5, 6, 0], [7, 0]], "right", 0)
    with torch.no_grad():
        before = RewardNetwork(model)(ids, mask)
        with_own_pad_token(load_tokenizer(TokenizerConfig(), None, tiny_tokenizer(pad=False)), model)
        torch.testing.assert_close(RewardNetwork(model)(ids, mask), before, rtol=0, atol=0)


def test_a_language_model_gets_a_head(tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "lm")
    torch.manual_seed(0)
    model = load_reward_model(path)
    assert model.config.num_labels == 1 and model.score.weight.shape == (1, 16)
    base = tiny_lm("gpt2").state_dict()
    assert torch.equal(model.transformer.wte.weight, base["transformer.wte.weight"])


def two_labels() -> Any:
    return AutoModelForSequenceClassification.from_config(tiny_config())


@pytest.mark.parametrize(
    ("path", "trained", "message"),
    [
        ("{tmp}/nowhere", False, r"data\.x \('.*nowhere'\): there is no such folder"),
        ("{tmp}/lm", True, r"data\.x \('.*lm'\) holds GPT2LMHeadModel, which has no trained head for rewards"),
        (tiny_config("granite"), False, r"data\.x \(GraniteConfig\) cannot be loaded .* Unrecognized configuration"),
        (two_labels, False, r"data\.x: a reward model is a classifier with one label.*GPT2ForSequenceCl.* with 2"),
        (tiny_lm, False, r"data\.x: a reward model is a classifier with one label.* not a GPT2LMHeadModel"),
        (T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2), False, "has an encoder and a decoder"),
    ],
)
def test_what_is_no_reward_model_is_refused(path: Any, trained: bool, message: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "lm")
    path = path.format(tmp=tmp_path) if isinstance(path, str) else path() if callable(path) else path
    with pytest.raises(ConfigError, match=message):
        load_reward_model(path, trained=trained, option="data.x")
