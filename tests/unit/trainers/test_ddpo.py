"""DDPO: its loss, advantages and rounds on a tiny pipeline."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests import tiny_pipelines
from tests.contract.images import PROMPTS
from tests.contract.recipes import LORA, make
from tests.unit.trainers import ddpo_numpy as twin
from trlx_like.config.methods.ddpo import DDPOConfig
from trlx_like.errors import ConfigError, DataError, RewardError

# Some steps are refused, so the optimiser never gets to the first.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")

NAME = "DDPOTrainer"
ONE_BATCH = {"method.chunk_size": 5, "train.batch_size": 5, "method.inner_epochs": 1}
SD15 = {"steps_offset": 1, "set_alpha_to_one": False}


def filled(folder: Path, **changes: Any) -> Any:
    """A trainer with a round's experience."""
    trainer = make(NAME, folder, **{**ONE_BATCH, **changes})
    trainer.make_experience()
    return trainer


def batch_of(trainer: Any) -> Any:
    return trainer.experience_class.collate(trainer.store.elements)


def test_the_loss_is_that_of_the_definition(tmp_path: Path) -> None:
    """Means of the model before and after an update, the rest in numpy."""
    trainer = filled(tmp_path, **{"method.beta": 0.3, "method.cliprange": 0.01, "method.adv_clip": 5.0})
    trainer.optimize(batch_of(trainer))
    batch = batch_of(trainer)
    schedule, sampler = trainer.sampler.schedule, trainer.sampler
    losses, kls, clips = [], [], []
    for part in trainer.microbatches(batch):
        x, prev = part.latents.unbind(1)
        t = part.order[:, 0]
        with torch.no_grad():
            guided, _ = trainer.model(x, schedule.times(t), part, 2.0)
            mean = schedule.mean(guided, t, x).double().numpy()
            other = sampler.reference_mean(x, t, part).double().numpy()
        for row, number in enumerate(t.tolist()):
            std, old = float(schedule.stds[number]), float(part.old_logprobs[row, 0])
            new = twin.logprob(prev[row].double().numpy(), mean[row], std)
            kls.append(twin.kl(mean[row], other[row], std))
            losses.append(twin.clipped(float(part.advantages[row]), new, old, 0.01))
            clips.append(abs(np.exp(new - old) - 1) > 0.01)
    trainer.accept = lambda metrics: False
    metrics = trainer.optimize(batch)
    assert len(losses) == 5 * 2  # the last of three steps is certain
    assert min(kls) > 0
    assert 0 < np.mean(clips) < 1
    assert metrics["losses/policy_loss"] == pytest.approx(np.mean(losses), rel=1e-3, abs=1e-4)
    assert metrics["losses/kl"] == pytest.approx(np.mean(kls), rel=1e-3)
    assert metrics["policy/clip_fraction"] == pytest.approx(np.mean(clips))
    assert metrics["losses/total_loss"] == pytest.approx(np.mean(losses) + 0.3 * np.mean(kls), rel=1e-3, abs=1e-4)


def gradients(trainer: Any) -> list[torch.Tensor]:
    """Of one refused step on all that is stored."""
    found: list[torch.Tensor] = []

    def look(metrics: Any) -> bool:
        found.extend(parameter.grad.clone() for parameter in trainer.model.parameters())
        return False

    trainer.accept = look
    trainer.optimize(batch_of(trainer))
    return found


def test_at_a_ratio_of_1_both_losses_have_the_same_gradient(tmp_path: Path) -> None:
    """d/dw A r = A r dlogp/dw: REINFORCE's at r = 1. Their values differ."""
    clip, reinforce = (filled(tmp_path, **{"method.loss_type": kind}) for kind in ("clip", "score_function"))
    for got, expected in zip(gradients(clip), gradients(reinforce), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_what_leaves_the_range_has_no_gradient(tmp_path: Path) -> None:
    trainer = filled(tmp_path, **{"method.cliprange": 1e-4})
    for element in trainer.store.elements:
        element.advantages.fill_(1.0)
        element.old_logprobs -= 1.0  # every ratio is e
    assert all(not gradient.any() for gradient in gradients(trainer))


def test_the_kl_is_0_at_the_start_and_holds_back(tmp_path: Path) -> None:
    metrics = {}
    for beta in (1e-6, 10.0):
        trainer = filled(tmp_path, **{"method.beta": beta})
        first = trainer.optimize(batch_of(trainer))
        assert first["losses/kl"] == 0
        for _ in range(5):
            metrics[beta] = trainer.optimize(batch_of(trainer))["losses/kl"]
    assert 0 < metrics[10.0] < 0.5 * metrics[1e-6]


# Micro-batches.


def test_a_microbatch_is_one_step_of_some_images(tmp_path: Path) -> None:
    trainer = filled(tmp_path, **{"train.minibatch_size": 1, "model.model_path": tiny_pipelines.sd(**SD15)})
    batch = batch_of(trainer)
    seen: dict[int, list[int]] = {}
    sizes: list[int] = []
    trainer.model.denoiser.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    for part in trainer.microbatches(batch):
        (row,) = [row for row in range(5) if torch.equal(batch.latents[row, part.order[0, 0]], part.latents[0, 0])]
        t = int(part.order[0, 0])
        assert torch.equal(part.latents[0, 1], batch.latents[row, t + 1])
        assert part.old_logprobs.tolist() == [[float(batch.old_logprobs[row, t])]]
        assert part.advantages.tolist() == [float(batch.advantages[row])]
        seen.setdefault(row, []).append(t)
        trainer.loss(part)
    assert {row: sorted(steps) for row, steps in seen.items()} == {row: [0, 1, 2] for row in range(5)}
    assert len({tuple(steps) for steps in seen.values()}) > 1  # each in an order of its own
    assert set(sizes) == {2}  # the image with its prompt and with the negative one


def test_a_share_of_the_steps_is_another_one_in_each_pass(tmp_path: Path) -> None:
    changes = {"method.timestep_fraction": 0.5, "method.num_inference_steps": 5, "method.inner_epochs": 3}
    trainer = filled(tmp_path, **changes)
    trainer.begin_round()
    steps = []
    for batch in trainer.round_batches():
        parts = list(trainer.microbatches(batch))
        assert len(parts) == 2
        own = int(batch.order[0, 0]), batch.latents[0, 0, 0, 0, 0].item()
        steps.append((own[1], [int(part.order[0, 0]) for part in parts]))
        trainer.progress.position += 1
    assert len(steps) == 3
    order = {float(element.latents[0, 0, 0, 0]): element.order.tolist() for element in trainer.store.elements}
    for number, (image, taken) in enumerate(steps):
        assert taken == [order[image][(2 * number + place) % 4] for place in range(2)]


# Advantages.


def scores(values: Sequence[float | None]) -> Callable[..., Any]:
    """A reward function that gives these in turn."""
    left = list(values)

    def function(images: Sequence[Any]) -> list[float | None]:
        taken = left[: len(images)]
        del left[: len(images)]
        return taken

    return function


def advantages_of(folder: Path, values: Sequence[float | None], **changes: Any) -> list[float]:
    changes = {"method.num_samples": len(values), "method.adv_clip": 5.0, "train.batch_size": 2, **changes}
    trainer = make(NAME, folder, **changes, reward_fn=scores(values))
    trainer.eval_prompts = None
    trainer.make_experience()
    return [float(element.advantages) for element in trainer.store.elements]


def test_advantages_by_prompt_are_the_default(tmp_path: Path) -> None:
    """Prompts with 1 3 and 10 20: -1, 1 each. By the round all of the first would be below its mean of 8.5.

    A prompt with too few rewards is compared with its round.
    """
    changes: dict[str, Any] = {"method.num_generations": 2, "method.chunk_size": 1, "method.stat_min_count": 2}
    assert DDPOConfig().advantages == "prompt"
    assert advantages_of(tmp_path, [1, 3, 10, 20], **changes) == pytest.approx([-1, 1, -1, 1], abs=2e-6)
    few = advantages_of(tmp_path, [1, 3, 10, 20], **{**changes, "method.stat_min_count": 3})
    # Squares 510 / 4 - 72.25 = 55.25, deviation 7.4330344.
    assert few == pytest.approx([-7.5 / 7.4330344, -5.5 / 7.4330344, 1.5 / 7.4330344, 11.5 / 7.4330344], abs=2e-6)


def test_advantages_by_round(tmp_path: Path) -> None:
    # 1 2 3 4: mean 2.5, deviation sqrt(1.25) = 1.1180340.
    found = advantages_of(tmp_path, [1, 2, 3, 4], **{"method.advantages": "round"})
    assert found == pytest.approx([-1.3416408, -0.4472136, 0.4472136, 1.3416408], abs=2e-6)
    assert advantages_of(tmp_path, [1, 2, 3, 4], **{"method.advantages": "round", "method.adv_clip": 0.5}) == (
        pytest.approx([-0.5, -0.4472136, 0.4472136, 0.5], abs=2e-6)
    )


def test_an_image_without_a_reward_is_left_out(tmp_path: Path) -> None:
    found = advantages_of(tmp_path, [1, None, 3, None], **{"method.advantages": "round"})
    assert found == pytest.approx([-1, 1], abs=2e-6)
    with pytest.raises(RewardError, match="abstained"):
        advantages_of(tmp_path, [None, None])


def test_advantages_by_group(tmp_path: Path) -> None:
    """Groups 1 3, 2 2 (left out), 5 9: distances 1 and 2 from their means, over the deviation of all.

    1 3 2 2 5 9: mean 22 / 6, squares 124 / 6 - 13.4444444 = 7.2222222, deviation 2.6874192 + 1e-4.
    """
    changes = {"method.advantages": "group", "method.num_generations": 2, "method.chunk_size": 1}
    found = advantages_of(tmp_path, [1, 3, 2, 2, 5, 9], **changes)
    unit = 1 / 2.6875192
    assert found == pytest.approx([-unit, unit, -2 * unit, 2 * unit], abs=2e-6)


def test_a_round_of_equal_groups_passes_without_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    changes = {"method.advantages": "group", "method.num_generations": 2, "method.num_samples": 4}
    trainer = make(NAME, tmp_path, **changes, reward_fn=lambda images: [1] * len(images))
    with caplog.at_level(logging.WARNING):
        metrics = trainer.learn()
    assert trainer.progress.step == 0
    assert metrics["reward/mean"] == 1
    assert "Nothing of this round can be learned from" in caplog.text


# What goes in and what comes out.


def test_what_a_reward_function_sees(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def look(images: Any, prompts: list[str], weight: list[float]) -> list[float]:
        seen.append({"images": images, "prompts": prompts, "weight": weight})
        return [0.5 * w for w in weight]

    prompts = [{"prompt": text, "weight": len(text)} for text in PROMPTS]
    for kind in ("pil", "tensor"):
        filled(tmp_path, **{"method.image_type": kind}, prompts=prompts, reward_fn=look)
    pictures, tensors = seen
    assert all(isinstance(image, Image.Image) and image.size == (8, 8) for image in pictures["images"])
    assert tensors["images"].shape == (5, 3, 8, 8)
    assert tensors["images"].dtype == torch.float32
    assert tensors["images"].min() >= 0 and tensors["images"].max() <= 1
    assert pictures["prompts"] == tensors["prompts"]
    assert sorted(pictures["prompts"]) == sorted(PROMPTS)
    assert [len(text) for text in pictures["prompts"]] == pictures["weight"]
    levels = np.stack([np.asarray(image) for image in pictures["images"]]).transpose(0, 3, 1, 2)
    np.testing.assert_allclose(levels / 255, tensors["images"].numpy(), atol=0.5 / 255 + 1e-6)


def test_prompts_from_a_function(tmp_path: Path) -> None:
    calls: list[int] = []

    def prompt() -> str:
        calls.append(1)
        return "abc"[len(calls) % 3]

    trainer = filled(tmp_path, prompts=prompt)
    assert len(trainer.eval_prompts) == 5
    assert len(calls) == 10
    with pytest.raises(DataError, match="call 0 of prompts is a int"):
        make(NAME, tmp_path, prompts=lambda: 3)


def test_images_by_hand(tmp_path: Path) -> None:
    trainer = make(NAME, tmp_path)
    torch.manual_seed(0)
    first = trainer.generate(["a", {"prompt": "b", "negative_prompt": "c"}])
    torch.manual_seed(0)
    again = trainer.generate(["a", {"prompt": "b", "negative_prompt": "c"}])
    assert [np.asarray(image).tolist() for image in first] == [np.asarray(image).tolist() for image in again]
    assert len(first) == 2


def test_images_may_be_drawn_few_at_a_time(tmp_path: Path) -> None:
    trainer = make(NAME, tmp_path, **{"sampler.batch_size": 2})
    sizes: list[int] = []
    trainer.model.denoiser.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
    assert len(trainer.generate(["a"] * 5)) == 5
    assert sizes == [4] * 3 + [4] * 3 + [2] * 3


def test_a_checkpoint_of_an_adapter_has_the_adapter(tmp_path: Path) -> None:
    trainer = make(NAME, tmp_path, **{"model.peft_config": {**LORA, "r": 2}, "train.total_steps": 1})
    trainer.learn()
    state = json.loads((tmp_path / "checkpoint_1" / "state" / "shared" / "model.json").read_text())
    assert "lora_A" in str(state)
    assert "conv_in" not in str(state)


def test_another_pipeline_under_an_adapter_is_refused(tmp_path: Path) -> None:
    changes = {"model.peft_config": {**LORA, "r": 2}, "train.total_steps": 1}
    make(NAME, tmp_path, **changes).learn()
    other = tiny_pipelines.sd()
    with torch.no_grad():
        other.unet.conv_in.weight.add_(1.0)
    trainer = make(NAME, tmp_path, **{**changes, "model.model_path": other, "train.force_resume": True})
    with pytest.raises(Exception, match="what the adapter is for is not the model that the run began with"):
        trainer.load(tmp_path)


# What is refused, in one line, before a pipeline is loaded.


def test_what_the_trainer_refuses(tmp_path: Path) -> None:
    nowhere = {"model.model_path": str(tmp_path / "nothing")}
    of_text: dict[str, dict[str, Any]] = {
        "makes images and cannot use stop_sequences": {"stop_sequences": ["x"]},
        "makes images and cannot use tokenizer": {"tokenizer": object()},
        "makes images and cannot use logit_mask": {"logit_mask": torch.ones(1)},
    }
    for message, arguments in of_text.items():
        with pytest.raises(ConfigError, match=message):
            make(NAME, tmp_path, **nowhere, **arguments)
    cases: dict[str, Any] = {
        r"prompts\[1\] is a int": ["a", 1],
        r"prompts\[0\]: a dict needs a string under 'prompt'; it has \['words'\]": [{"words": "a"}],
        r"prompts\[0\]: 'images' is already an argument of reward functions": [{"prompt": "a", "images": 1}],
        r"prompts\[0\]: 'negative_prompt' must be a string": [{"prompt": "a", "negative_prompt": 1}],
        "prompts is empty": [],
    }
    for message, prompts in cases.items():
        with pytest.raises(DataError, match=message):
            make(NAME, tmp_path, **nowhere, prompts=prompts)
    with pytest.raises(RewardError, match="returned .1, 2. for sample 0: it must be one number"):
        filled(tmp_path, reward_fn=lambda images: [[1, 2]] * len(images))
    with pytest.raises(RewardError, match=r"wants outputs, which is neither images, prompts or tokenizer nor a key"):
        filled(tmp_path, reward_fn=lambda outputs: [1])
