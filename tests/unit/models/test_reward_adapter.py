"""A reward head as an adapter on the policy's base: the rewards of the whole reward model, and an untouched policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.tiny import tiny_config
from tests.unit.models.support import sharp_lm
from tests.unit.models.test_reward_model import padded
from trlx_like import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead
from trlx_like.errors import ConfigError
from trlx_like.models.reward_model import load_reward_model

ROWS = [[5, 6, 7, 8, 0], [9, 3], [4, 0], [7] * 9]
"""None ends with the pad id (1), where transformers would look at the token before. EOS (0) pads here."""
TARGETS = {"gpt2": "c_attn", "llama": "q_proj"}


def lora(family: str, **options: Any) -> LoraConfig:
    options = {"r": 2, "target_modules": [TARGETS[family]], "fan_in_fan_out": family == "gpt2", **options}
    return LoraConfig(init_lora_weights=False, **options)


def reward_model(lm: PreTrainedModel, family: str, folder: Path, **options: Any) -> PeftModel:
    """A reward model on the weights of `lm`, its adapter and head trained a step and saved as peft saves them."""
    classifier = load_reward_model(tiny_config(family, layers=3))
    classifier.base_model.load_state_dict(lm.base_model.state_dict())
    torch.manual_seed(1)
    model = get_peft_model(classifier, lora(family, task_type="SEQ_CLS", **options))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ids, _ = padded([[5, 6, 7], [7, 6, 5]], "right", 0)
    chosen, rejected = model(input_ids=ids[:1]).logits, model(input_ids=ids[1:]).logits
    (rejected - chosen).sum().backward()
    optimizer.step()
    model.save_pretrained(str(folder))
    return model.eval()


def with_policy_adapter(lm: PreTrainedModel, family: str) -> AutoModelForCausalLMWithValueHead:
    torch.manual_seed(2)
    lm.add_adapter(lora(family), adapter_name="default")
    return AutoModelForCausalLMWithValueHead.from_pretrained(lm)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_scores_are_those_of_the_whole_reward_model(family: str, tmp_path: Path) -> None:
    lm = sharp_lm(family)
    trained = reward_model(lm, family, tmp_path)
    with torch.no_grad():
        expected = [float(trained(input_ids=torch.tensor([row])).logits) for row in ROWS]
    model = with_policy_adapter(lm, family)
    model.add_and_load_reward_modeling_adapter(tmp_path)
    for side in ("left", "right"):
        ids, mask = padded(ROWS, side, 0)
        scores = model.compute_reward_score(ids, mask.long())
        assert scores.shape == (len(ROWS), 1, 1) and not scores.requires_grad
        assert scores[:, -1, 0].tolist() == pytest.approx(expected, abs=2e-5)
    assert len(set(expected)) == len(ROWS)
    alone = model.compute_reward_score(input_ids=torch.tensor([ROWS[0]]))
    assert float(alone) == pytest.approx(expected[0], abs=2e-5)


def test_the_policy_is_what_it_was(tmp_path: Path) -> None:
    lm = sharp_lm("llama")
    reward_model(lm, "llama", tmp_path)
    model = with_policy_adapter(lm, "llama").train()
    ids, mask = padded(ROWS, "left", 0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = model(ids, mask)[0].detach()
    for step in ("load", "score"):
        if step == "load":
            model.add_and_load_reward_modeling_adapter(tmp_path, adapter_name="judge")
        else:
            model.compute_reward_score(ids, mask)
        assert torch.equal(model(ids, mask)[0], before)
        assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == trained
        assert model.training and lm.training and lm.active_adapters() == ["default"]
    assert any(".lora_A.default." in name for name in trained)
    assert not any("judge" in name or "score" in name for name in trained)


def test_training_the_policy_leaves_the_rewards(tmp_path: Path) -> None:
    lm = sharp_lm("gpt2")
    reward_model(lm, "gpt2", tmp_path)
    model = with_policy_adapter(lm, "gpt2")
    model.add_and_load_reward_modeling_adapter(tmp_path)
    ids, mask = padded(ROWS, "right", 0)
    before, policy = model.compute_reward_score(ids, mask), model(ids, mask)[0].detach()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(ids, mask)[0].square().mean().backward()
    optimizer.step()
    assert not torch.allclose(model(ids, mask)[0], policy)
    assert torch.equal(model.compute_reward_score(ids, mask), before)


def test_what_cannot_be_a_reward_adapter(tmp_path: Path) -> None:
    lm = sharp_lm("llama")
    reward_model(lm, "llama", tmp_path / "good")
    get_peft_model(sharp_lm("llama"), lora("llama")).save_pretrained(str(tmp_path / "headless"))
    reward_model(sharp_lm("gpt2"), "gpt2", tmp_path / "gpt2")
    plain = AutoModelForCausalLMWithValueHead.from_pretrained(sharp_lm("llama"))
    with pytest.raises(ConfigError, match="give the policy an adapter of its own first"):
        plain.add_and_load_reward_modeling_adapter(tmp_path / "good")
    model = with_policy_adapter(lm, "llama")
    with pytest.raises(ConfigError, match="there is no reward adapter"):
        model.compute_reward_score(torch.tensor([[3]]))
    with pytest.raises(ConfigError, match="'default'.: the policy has an adapter of that name"):
        model.add_and_load_reward_modeling_adapter(tmp_path / "good", "default")
    with pytest.raises(ConfigError, match="is an adapter without a head 'score'"):
        model.add_and_load_reward_modeling_adapter(tmp_path / "headless")
    with pytest.raises(ConfigError, match="cannot be loaded as an adapter"):
        model.add_and_load_reward_modeling_adapter(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="gpt2' (is no adapter for LlamaForCausalLM|cannot be loaded)"):
        model.add_and_load_reward_modeling_adapter(tmp_path / "gpt2")


def test_by_an_option_and_on_a_peft_model(tmp_path: Path) -> None:
    lm = sharp_lm("llama")
    trained = reward_model(lm, "llama", tmp_path / "reward")
    lm.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        expected = [float(trained(input_ids=torch.tensor([row])).logits) for row in ROWS]
    policy = get_peft_model(sharp_lm("llama"), lora("llama"))
    ids, mask = padded(ROWS, "left", 0)
    for model in (
        AutoModelForCausalLMWithValueHead.from_pretrained(policy, reward_adapter=tmp_path / "reward"),
        AutoModelForCausalLMWithValueHead.from_pretrained(
            tmp_path / "base",
            peft_config=lora("llama"),
            reward_adapter=str(tmp_path / "reward"),
            reward_adapter_name="judge",
        ),
    ):
        assert model.compute_reward_score(ids, mask)[:, -1, 0].tolist() == pytest.approx(expected, abs=2e-5)
        assert not any("score" in name or "reward" in name for name, p in model.named_parameters() if p.requires_grad)
    assert "judge" in model.pretrained_model.peft_config


def test_of_an_encoder_decoder(tmp_path: Path) -> None:
    """A head that reads the decoder's last state, under an adapter that peft saved beside it."""
    lm: Any = sharp_lm("t5")
    judge: Any = get_peft_model(sharp_lm("t5"), LoraConfig(r=2, target_modules=["q"], init_lora_weights=False))
    judge.save_pretrained(str(tmp_path))
    file = tmp_path / "adapter_model.safetensors"
    head = torch.linspace(-1, 1, 16)[None]
    save_file({**load_file(file), "base_model.model.score.weight": head}, file)
    lm.add_adapter(LoraConfig(r=2, target_modules=["v"], init_lora_weights=False))
    model = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(lm, reward_adapter=tmp_path)
    prompts, prompt_mask = padded([[5, 6, 7], [9]], "right", 0)
    given, mask = padded([[1, 8, 9, 4], [1, 3]], "right", 0)
    decoder = {"decoder_input_ids": given, "decoder_attention_mask": mask.long()}
    with torch.no_grad():
        for row in range(2):
            one = {
                "input_ids": prompts[row : row + 1][:, prompt_mask[row]],
                "decoder_input_ids": given[row : row + 1][:, mask[row]],
            }
            state = judge(**one, output_hidden_states=True).decoder_hidden_states[-1][0, -1]
            scores = model.compute_reward_score(prompts, prompt_mask.long(), **decoder)
            assert float(scores[row]) == pytest.approx(float(state @ head[0]), abs=1e-4)
    with pytest.raises(ConfigError, match="there is no reward adapter"):
        AutoModelForSeq2SeqLMWithValueHead(sharp_lm("t5")).compute_reward_score(prompts, **decoder)
