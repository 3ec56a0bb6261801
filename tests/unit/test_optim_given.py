"""An optimizer and a schedule that a program has made itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LinearLR, LRScheduler, MultiStepLR, ReduceLROnPlateau, SequentialLR
from transformers import AutoModelForSequenceClassification

import trlx_like
from tests.contract.recipes import LORA, NO_DROPOUT, RECIPES, ingredients, make
from tests.contract.runs import StopAfter, assert_same, assert_same_run, rows, run_until_stopped, state_of
from tests.tiny import tiny_config, tiny_lm
from tests.tiny_pipelines import saved
from trlx_like.config.trl import TRLConfig
from trlx_like.errors import ConfigError

AUTO = {"train.resume_from_checkpoint": "auto"}


def stepwise(lm: Any) -> tuple[Optimizer, LRScheduler]:
    """AdamW without weight decay for vectors, warmed up for two steps and then divided by two at each second one."""
    matrices, vectors = ([p for p in lm.parameters() if (p.dim() < 2) is flat] for flat in (False, True))
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=1e-2, weight_decay=0.1)
    warm, fall = LinearLR(optimizer, start_factor=0.5, total_iters=2), MultiStepLR(optimizer, [2, 4], gamma=0.5)
    return optimizer, SequentialLR(optimizer, [warm, fall], milestones=[2])


def options(lm: Any, made: tuple[Any, Any]) -> dict[str, Any]:
    own: dict[str, Any] = {"optimizer.name": made[0], "optimizer.kwargs": {}, "scheduler.kwargs": {}}
    return {"model.model_path": lm, **own, "scheduler.name": made[1], "train.eval_interval": 100}


def test_a_run_is_resumed_bit_by_bit(tmp_path: Path) -> None:
    """PPO, whose frozen layer leaves the optimizer and whose value head joins it."""
    made = {}
    for name in ("whole", "parts", "resumed"):
        lm = tiny_lm()
        few = {"train.total_steps": 6, "train.save_best": False, "model.num_layers_unfrozen": 1}
        made[name] = {**options(lm, stepwise(lm)), **few, **AUTO}
    whole = make("PPOTrainer", tmp_path / "whole", **made["whole"])
    whole.learn()
    run_until_stopped(make("PPOTrainer", tmp_path / "parts", **made["parts"], callbacks=[StopAfter(3)]))
    resumed = make("PPOTrainer", tmp_path / "parts", **made["resumed"])
    resumed.learn()
    assert_same_run(resumed, whole, tmp_path / "parts", tmp_path / "whole")
    rates = [row["learning_rate"] for row in rows(tmp_path / "whole") if row["step"]]
    assert rates == pytest.approx([0.005, 0.0075, 0.01, 0.01, 0.005, 0.005])
    optimizer = made["whole"]["optimizer.name"]
    assert whole.optimizer.optimizer is optimizer and whole.optimisation.scheduler is made["whole"]["scheduler.name"]
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert set(updated) == set(optimizer.state) == {p for p in whole.model.parameters() if p.requires_grad}
    assert len(updated) == len(set(updated)) < len(list(whole.model.parameters()))
    assert set(whole.model.heads.parameters()) <= set(optimizer.param_groups[-1]["params"])


def test_the_run_is_that_of_the_names(tmp_path: Path) -> None:
    """By `train`, whose record of the run has the classes."""
    kwargs = {"lr": 1e-2, "betas": [0.8, 0.9], "fused": False}
    named = make("SFTTrainer", tmp_path / "named", **{"model.model_path": tiny_lm(), "optimizer.kwargs": kwargs})
    named.learn()
    lm = tiny_lm()
    config, given = ingredients("SFTTrainer", tmp_path / "given", **{"model.model_path": lm})
    optimizer = AdamW(lm.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.01)
    trainer = trlx_like.train(config, optimizers=(optimizer, LambdaLR(optimizer, lambda step: 1.0)), **given)
    expected = state_of(named)
    assert_same(state_of(trainer)["model"], expected["model"])
    written = (tmp_path / "given" / "config.yml").read_text(encoding="utf-8")
    assert "name: <object AdamW>" in written and "name: <object LambdaLR>" in written
    with pytest.raises(ConfigError, match=r"config.yml:\d+: optimizer.name: <object AdamW> was given from Python"):
        TRLConfig.load_yaml(tmp_path / "given" / "config.yml")


def test_an_optimizer_alone_follows_the_schedule_of_the_configuration(tmp_path: Path) -> None:
    """And with an adapter its group has what is trained, of which it had nothing."""
    lm = tiny_lm()
    config, given = ingredients(
        "SFTTrainer", tmp_path, **{"model.model_path": lm, "model.peft_config": LORA, "train.total_steps": 3}
    )
    config = config.evolve(scheduler={"name": "linear", "kwargs": {}, "warmup": 2})
    optimizer = SGD(lm.named_parameters(), lr=0.1, momentum=0.5)
    trainer = trlx_like.train(config, optimizers=optimizer, **given)
    assert [row["learning_rate"] for row in rows(tmp_path) if row["step"]] == pytest.approx([0.0, 0.05, 0.1])
    assert set(optimizer.param_groups[0]["params"]) == {p for p in trainer.model.parameters() if p.requires_grad}


def test_a_schedule_of_schedules_is_rolled_back(tmp_path: Path) -> None:
    lm = tiny_lm()
    trainer = make("SFTTrainer", tmp_path, **options(lm, stepwise(lm)))
    assert trainer.optimisation.scale_learning_rate(0.5) == pytest.approx(0.0025)
    for _ in range(2):
        trainer.optimizer.step()
        trainer.optimisation.scheduler.step()
    assert trainer.optimisation.scheduler.get_last_lr() == pytest.approx([0.005, 0.005])


def test_what_cannot_be_used_is_said(tmp_path: Path) -> None:
    lm = tiny_lm()
    some = [p for name, p in lm.named_parameters() if "wte" not in name]
    other = AdamW(tiny_lm().parameters())
    for optimizer, words in (
        (other, r"optimizer.name \(AdamW\): none of its parameters is one of the model's"),
        (SGD(some, lr=0.1), r"optimizer.name \(SGD\): 1 trained parameters .* such as lm.transformer.wte.weight"),
        (torch.optim.LBFGS(lm.parameters()), r"optimizer.name \(LBFGS\): its step needs a closure"),
    ):
        with pytest.raises(ConfigError, match=words):
            make("SFTTrainer", tmp_path, **options(lm, (optimizer, "constant")))
    config, _ = ingredients("SFTTrainer", tmp_path)
    mine = AdamW(lm.parameters())
    for changes, words in (
        ({"optimizer": {"name": AdamW}}, "optimizer.name: must be a registered name or an optimizer of torch"),
        ({"optimizer": {"name": mine, "kwargs": {"lr": 1}}}, "optimizer.kwargs: is for an optimizer by its name"),
        ({"optimizer": {"name": mine, "no_decay": "norms_and_biases"}}, "optimizer.no_decay: is for an optimizer by"),
        ({"scheduler": {"name": LambdaLR}}, "scheduler.name: must be a registered name or a schedule of torch"),
        ({"scheduler": {"name": LambdaLR(mine, float)}}, "scheduler.name: is a schedule of another optimizer than"),
        ({"scheduler": {"name": LambdaLR(mine, float), "warmup": 3}}, "scheduler.warmup: is for a schedule by its"),
        ({"scheduler": {"name": ReduceLROnPlateau(mine)}}, "scheduler.name: ReduceLROnPlateau needs a metric at each"),
    ):
        with pytest.raises(ConfigError, match=words):
            config.evolve(**changes)
    divided = config.evolve(optimizer={"name": mine}, backend={"kind": "fsdp"}, model={"model_path": lm})
    with pytest.raises(ConfigError, match=r"optimizer.name \(AdamW .*\) must be the name of an optimizer that treats"):
        trlx_like.SFTTrainer(divided, samples=["ab"])


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RECIPES))
def test_every_trainer_resumes_with_objects(name: str, tmp_path: Path) -> None:
    def run(folder: str, **more: Any) -> Any:
        if name == "DDPOTrainer":
            from diffusers import DiffusionPipeline

            model = DiffusionPipeline.from_pretrained(saved("sd"))
            network = model.unet
        elif name == "RewardTrainer":
            torch.manual_seed(0)
            model = network = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1, **NO_DROPOUT))
        else:
            model = network = tiny_lm()
        return make(name, tmp_path / folder, **options(model, stepwise(network)), **AUTO, **more)

    whole = run("whole")
    whole.learn()
    run_until_stopped(run("parts", callbacks=[StopAfter(3)]))
    resumed = run("parts")
    resumed.learn()
    assert_same_run(resumed, whole, tmp_path / "parts", tmp_path / "whole")
