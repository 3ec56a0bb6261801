"""Heads beside a saved model: in the files of TRL and trlX, in shards, beside an adapter, and in a hub repository."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import tiny_lm
from trlx_like import AutoModelForCausalLMWithValueHead
from trlx_like.errors import ConfigError
from trlx_like.models.saved_heads import HEADS_FILE, read_heads

HIDDEN = torch.linspace(-1, 1, 48).reshape(3, 16)


def trl_head() -> dict[str, Tensor]:
    """The names and shapes of the head of TRL's models."""
    return {
        "v_head.summary.weight": torch.linspace(-0.5, 0.5, 16)[None],
        "v_head.summary.bias": torch.tensor([0.25]),
    }


def as_trl(folder: Path) -> Path:
    """A checkpoint as TRL's `save_pretrained` writes it: the head's weights among those of the model."""
    tiny_lm().save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file({**load_file(file), **trl_head()}, file, {"format": "pt"})
    return folder


def as_bin(folder: Path) -> Path:
    """The same in the older format."""
    torch.save(load_file(as_trl(folder) / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def as_shards(folder: Path) -> Path:
    """The same in two shards, of which the second has the head."""
    weights = load_file(as_trl(folder) / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places: dict[str, str] = {}
    for number, names in enumerate((list(weights)[:5], list(weights)[5:])):
        save_file({name: weights[name] for name in names}, folder / f"part-{number}.safetensors", {"format": "pt"})
        places |= dict.fromkeys(names, f"part-{number}.safetensors")
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


def as_adapter(folder: Path) -> Path:
    """An adapter, beside which TRL writes a file that holds the head alone."""
    from peft import LoraConfig, get_peft_model

    tiny_lm().save_pretrained(folder / "base")
    lm = tiny_lm()
    lm.config._name_or_path = lm.name_or_path = str(folder / "base")
    adapted: Any = get_peft_model(lm, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    adapted.save_pretrained(folder)
    torch.save(trl_head(), folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("layout", [as_trl, as_bin, as_shards, as_adapter])
def test_the_head_of_a_checkpoint_of_trl(layout: Any, tmp_path: Path) -> None:
    model = AutoModelForCausalLMWithValueHead.from_pretrained(layout(tmp_path)).eval()
    head = trl_head()
    expected = HIDDEN @ head["v_head.summary.weight"][0] + 0.25
    torch.testing.assert_close(model.v_head(HIDDEN), expected)
    assert model.state_dict()["v_head.summary.bias"] == 0.25
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.equal(model(ids)[0], tiny_lm()(ids).logits)


def test_the_head_of_a_checkpoint_of_trlx(tmp_path: Path) -> None:
    """Two layers in a row, without a name of their own."""
    tiny_lm().save_pretrained(tmp_path)
    head = {
        "v_head.0.weight": torch.linspace(-1, 1, 32 * 16).reshape(32, 16),
        "v_head.0.bias": torch.full((32,), 0.5),
        "v_head.2.weight": torch.linspace(-1, 1, 32)[None],
        "v_head.2.bias": torch.tensor([0.5]),
    }
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), **head}, file, {"format": "pt"})
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    inner = torch.relu(HIDDEN @ head["v_head.0.weight"].T + 0.5)
    torch.testing.assert_close(model.v_head(HIDDEN), inner @ head["v_head.2.weight"][0] + 0.5)
    with pytest.raises(ConfigError, match="summary_dropout_prob: the head in .* has two layers and no dropout"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, summary_dropout_prob=0.1)


@pytest.mark.parametrize("ours", [False, True])
def test_the_head_of_a_repository(ours: bool, tmp_path: Path) -> None:
    """The cache of the hub as a download leaves it; there is no network."""
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / "abc"
    if ours:
        model = AutoModelForCausalLMWithValueHead(tiny_lm())
        model.load_state_dict({**model.state_dict(), **trl_head()})
        model.save_pretrained(snapshot)
        assert (snapshot / HEADS_FILE).is_file()
    else:
        as_trl(snapshot)
    (tmp_path / "models--someone--tiny" / "refs").mkdir()
    (tmp_path / "models--someone--tiny" / "refs" / "main").write_text("abc")
    where = {"cache_dir": tmp_path, "local_files_only": True}
    model = AutoModelForCausalLMWithValueHead.from_pretrained("someone/tiny", **where)
    torch.testing.assert_close(model.v_head(HIDDEN), HIDDEN @ trl_head()["v_head.summary.weight"][0] + 0.25)


def test_without_heads_and_with_heads_that_do_not_fit(tmp_path: Path) -> None:
    tiny_lm().save_pretrained(tmp_path)
    assert read_heads(tmp_path, "v_head.") == ({}, "")
    fresh = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert fresh.state_dict()["v_head.summary.weight"].shape == (1, 16)
    save_file({"heads.value.summary.weight": torch.zeros(1, 8)}, tmp_path / HEADS_FILE)
    with pytest.raises(ConfigError, match=r"heads\.safetensors has a value head that does not fit GPT2LMHeadModel"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    (tmp_path / HEADS_FILE).write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"The heads in .*heads\.safetensors cannot be read"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
