"""Models given as objects, and defaults that belong to one optimizer."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.unit.config.support import TRAIN, sentence_of
from trlx_like.config import ModelConfig, OptimizerConfig, TRLConfig
from trlx_like.config.methods.ppo import PPOConfig
from trlx_like.presets import default_ddpo_config, default_ppo_config, default_sft_config


class LoadedModel:
    """Looks like a loaded model: it has a `config`."""

    config = object()
    name_or_path = "my/gpt2"


def test_other_optimisers_get_no_betas() -> None:
    assert OptimizerConfig(name="sgd").kwargs == {"lr": 3e-5}
    assert OptimizerConfig(name="AdamW_8bit_bnb").kwargs["betas"] == [0.9, 0.95]
    changed = default_ppo_config().evolve(optimizer={"name": "sgd"}, scheduler={"name": "constant"})
    assert (changed.optimizer.kwargs, changed.scheduler.kwargs) == ({"lr": 3e-5}, {})
    same = default_ppo_config().evolve(optimizer={"name": "AdamW", "kwargs": {"lr": 1.0}})
    assert same.optimizer.kwargs == {"lr": 1.0, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 1e-6}


def test_a_model_given_as_an_object_is_kept_but_not_written(tmp_path: Path) -> None:
    model, file = LoadedModel(), tmp_path / "config.yml"
    config = default_sft_config().evolve(
        model={"model_path": model}, method={"formatting_func": len}, train={"tags": ["a"]}
    )
    assert config.evolve(train={"seed": 1}).model.model_path is model
    assert json.loads(str(config))["model"]["model_path"] == "<object LoadedModel of my/gpt2>"
    config.dump_yaml(file)
    line = 1 + next(n for n, text in enumerate(file.read_text().splitlines()) if "formatting_func" in text)
    assert sentence_of(lambda: TRLConfig.load_yaml(file)).replace(str(file), "config.yml").split("\n") == [
        "config.yml:2: model.model_path: <object LoadedModel of my/gpt2> was given from Python and is not in "
        "this file; set model_path again.",
        f"config.yml:{line}: method.formatting_func: <object len> was given from Python and is not in this file; "
        "set formatting_func again.",
    ]
    again = TRLConfig.load_yaml(file, ["model.model_path=my/gpt2", "method.formatting_func=null"])
    assert (again.model.model_path, again.train.tags) == ("my/gpt2", ["a"])


def test_a_config_class_or_a_number_is_no_model() -> None:
    for wrong in (LoadedModel, 3, None):
        assert sentence_of(partial(ModelConfig, model_path=wrong)).startswith(
            "model.model_path: must be a folder, a hub name, a PretrainedConfig or a loaded model, got "
        )


def test_a_real_config_and_dtype_are_written_as_words(tmp_path: Path) -> None:
    import torch
    from transformers import GPT2Config

    extra = {"format": torch.bfloat16, "path": Path("a"), "size": (1, 2)}
    config = TRLConfig(
        method=PPOConfig(), train=TRAIN, model=ModelConfig(model_path=GPT2Config(), model_extra_configs=extra)
    )
    config.dump_yaml(tmp_path / "x.yml")
    written = yaml.safe_load((tmp_path / "x.yml").read_text())["model"]
    assert written["model_path"] == "<object GPT2Config>"
    assert written["model_extra_configs"] == {"format": "bfloat16", "path": "a", "size": [1, 2]}


def test_options_that_a_backend_would_not_follow_are_refused() -> None:
    refused = [
        ("shard", "gradients", "ddp", "fsdp or deepspeed"),
        ("shard", "optimizer", "fsdp", "deepspeed"),
        ("shard", "hybrid", "deepspeed", "fsdp"),
        ("offload", "optimizer", "fsdp", "deepspeed"),
        ("offload", "all", "ddp", "fsdp or deepspeed"),
        ("reduce_dtype", "bfloat16", "ddp", "fsdp or deepspeed"),
        ("rollout", "layers", "deepspeed", "fsdp"),
        ("deepspeed_config", {"zero_optimization": {}}, "fsdp", "deepspeed"),
    ]
    for option, value, kind, right in refused:
        given: dict[str, Any] = {"kind": kind, option: value}
        words = sentence_of(lambda: default_sft_config().evolve(backend=given))  # noqa: B023
        assert f"backend.{option}: " in words and f"needs backend.kind: {right}; it is {kind}." in words, words
        default_sft_config().evolve(backend={"kind": right.split()[0], option: value})
        default_sft_config().evolve(backend={"kind": "of_a_plugin", option: value})


def test_a_copy_of_all_weights_does_not_go_with_rollouts_by_layers() -> None:
    given: dict[str, Any] = {"backend": {"kind": "fsdp", "rollout": "layers"}, "sampler": {"engine": "copy"}}
    assert "backend.rollout: 'layers' saves" in sentence_of(lambda: default_ppo_config().evolve(**given))
    for engine in ("paged", "vllm", "vllm_colocated"):
        given["sampler"]["engine"] = engine
        words = f"'layers' needs sampler.engine: transformers; it is '{engine}'."
        assert words in sentence_of(lambda: default_ppo_config().evolve(**given))


def test_images_are_not_grouped_by_length() -> None:
    words = sentence_of(lambda: default_ddpo_config().evolve(train={"group_by_length": True}))
    assert "train.group_by_length: True is for text: images have no lengths" in words
