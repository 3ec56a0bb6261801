"""The tokenizer: which one is loaded, and whether it fits the model."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from tests.tiny import LETTERS, save_tiny, tiny_config, tiny_tokenizer
from trlx_like.config import TokenizerConfig
from trlx_like.errors import ConfigError
from trlx_like.models.tokenizer import load_tokenizer
from trlx_like.presets import PRESETS


def test_a_tokenizer_from_the_folder_of_the_model(tmp_path: Path) -> None:
    path = save_tiny(tmp_path)
    tokenizer = load_tokenizer(TokenizerConfig(truncation_side="left"), path)
    assert (tokenizer.padding_side, tokenizer.truncation_side) == ("left", "left")
    assert tokenizer.pad_token_id == 1 and tokenizer("ab").input_ids == [2, 3]


def test_a_tokenizer_without_pad_token_pads_with_its_eos() -> None:
    tokenizer = tiny_tokenizer(pad=False)
    assert load_tokenizer(TokenizerConfig(tokenizer_path=tokenizer), "unused") is tokenizer
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0


def test_a_tokenizer_made_by_a_function() -> None:
    assert load_tokenizer(TokenizerConfig(tokenizer_path="tests.tiny:tiny_tokenizer"), "unused").pad_token_id == 1


def test_tokenizers_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.tokenizer_path is missing"):
        load_tokenizer(TokenizerConfig(), tiny_config())
    with pytest.raises(ConfigError, match=rf"model\.model_path \('{tmp_path}'\) cannot be loaded as a tokenizer"):
        load_tokenizer(TokenizerConfig(), str(tmp_path))
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="has no EOS token"):
        load_tokenizer(TokenizerConfig(tokenizer_path=tokenizer), "unused")


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "ddpo"])
def test_a_preset_takes_the_tokenizer_of_the_model_that_it_is_given(name: str, tmp_path: Path) -> None:
    config = PRESETS[name]().evolve(model={"model_path": save_tiny(tmp_path)})
    tokenizer = load_tokenizer(config.tokenizer, config.model.model_path)
    assert tokenizer.get_vocab() == tiny_tokenizer().get_vocab()


def own(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name.startswith("trlx_like")]


def words(order: str) -> PreTrainedTokenizerFast:
    vocabulary = {token: number for number, token in enumerate(["<eos>", "<pad>", *order])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """Reversed letters: <eos>, <pad> and the letter in the middle keep their ids, 3 of 29."""
    model = save_tiny(tmp_path)
    order = "".join(token for token in tiny_tokenizer().get_vocab() if len(token) == 1)
    reversed_letters = words("".join(sorted(order, key=list(LETTERS).index, reverse=True)))
    same = sum(a == b for a, b in zip(LETTERS, reversed(LETTERS), strict=True)) + 2
    message = rf"only {same} of {len(LETTERS) + 2} tokens have the id .* Leave the option out"
    for config, given in (
        (TokenizerConfig(), reversed_letters),
        (TokenizerConfig(tokenizer_path=reversed_letters), None),
    ):
        with pytest.raises(ConfigError, match=message):
            load_tokenizer(config, model, given)


def test_two_tokens_that_changed_places_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = save_tiny(tmp_path)
    swapped = LETTERS[1] + LETTERS[0] + LETTERS[2:]
    load_tokenizer(TokenizerConfig(tokenizer_path=words(swapped)), model)
    (record,) = caplog.records
    assert "2 tokens have other ids than in the tokenizer of model.model_path" in record.getMessage()
    assert "3 in place of 2" in record.getMessage() or "2 in place of 3" in record.getMessage()


def test_a_vocabulary_that_was_extended_fits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = save_tiny(tmp_path)
    longer = tiny_tokenizer()
    longer.add_tokens(["new"])
    load_tokenizer(TokenizerConfig(tokenizer_path=longer), model)
    load_tokenizer(TokenizerConfig(), model)
    assert not caplog.records


@pytest.mark.parametrize(("size", "end"), [(30, 0), (30, 50256)])
def test_a_tokenizer_that_fits(size: int, end: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second end of text is one that the model cannot have: its class's default."""
    assert len(tiny_tokenizer()) == 30
    tiny_config(vocabulary=size, eos_token_id=end).save_pretrained(tmp_path)
    load_tokenizer(TokenizerConfig(), str(tmp_path), tiny_tokenizer())
    assert not own(caplog)


def test_signs_of_another_models_tokenizer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model of 200 tokens that ends with token 5, and a tokenizer of 30 that ends with 0."""
    tiny_config(vocabulary=200, eos_token_id=5).save_pretrained(tmp_path)
    load_tokenizer(TokenizerConfig(), str(tmp_path), tiny_tokenizer())
    (record,) = own(caplog)
    assert "ends texts with token 0, the model with 5, and it has 30 tokens, the model 200" in record.getMessage()
