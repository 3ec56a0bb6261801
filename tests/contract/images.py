"""The tiny runs of trainers of images, and the reward functions that they have."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from tests.tiny_pipelines import saved

PROMPTS = ["ab", "abcdefg", "b", "the cats", "zz top"]


def brightness(images: Any, **_: Any) -> list[float]:
    """Of the whole image, of 0 to 1. images: pictures, or a tensor."""
    return [float(np.asarray(image, dtype=np.float64).mean()) for image in images]


def contrast(images: Any, **_: Any) -> dict[str, list[float]]:
    return {"contrast": [float(np.asarray(image, dtype=np.float64).std()) for image in images]}


def caption() -> dict[str, Any]:
    """A prompt that is made up."""
    return {"prompt": "".join(random.choices("abc", k=3)), "weight": random.random()}


DDPO: dict[str, Any] = {
    "method": {"name": "DDPOConfig", "num_inference_steps": 3, "guidance_scale": 2.0, "num_samples": 5}
    | {
        "chunk_size": 2,
        "inner_epochs": 2,
        "stat_buffer_size": 3,
        "stat_min_count": 2,
        "cliprange": 0.1,
        "adv_clip": 0.1,
    },
    "train": {"epochs": 2, "total_steps": 100},
    "arguments": {"prompts": PROMPTS, "reward_fn": brightness, "metric_fn": contrast},
    "model": {"model_path": saved("sd"), "model_arch_type": "diffusion"},
    "variants": {
        "adapter": {
            "model.peft_config": {"peft_type": "LORA", "r": 2},
            "method.beta": 0.1,
            "method.timestep_fraction": 0.5,
            "method.inner_epochs": 1,
            "train.epochs": 3,
            "method.train_cfg": False,
            "prompts": caption,
        },
        "sdxl": {
            "model.model_path": saved("sdxl"),
            "method.advantages": "round",
            "method.loss_type": "score_function",
            "method.inner_epochs": 1,
            "method.beta": 0.1,
            "method.negative_prompt": "z",
            "method.image_type": "tensor",
            "train.epochs": 3,
        },
        "sd3": {
            "model.model_path": saved("sd3"),
            "method.num_samples": 6,
            "method.num_generations": 2,
            "method.advantages": "group",
            "method.guidance_gradient": False,
            "method.inner_epochs": 1,
            "train.epochs": 3,
            "train.eval_interval": 2,
            "prompts": [{"prompt": text, "negative_prompt": "z" * row} for row, text in enumerate(PROMPTS)],
        },
    },
}
"""As of `Recipe`."""
