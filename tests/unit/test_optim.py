"""Optimisers and schedulers by name: the right ones, with the options that were given."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, Trainer
from transformers.training_args import OptimizerNames

from tests.contract.recipes import LORA, make
from tests.contract.runs import StopAfter, assert_same_run, rows, run_until_stopped
from trlx_like import optim
from trlx_like.config import OptimizerConfig, SchedulerConfig
from trlx_like.errors import ConfigError, RegistryError
from trlx_like.models.merging import weights_for_rate
from trlx_like.optim import (
    FUSED,
    OPTIMIZERS,
    OTHERS,
    SCHEDULERS,
    TRANSFORMERS,
    learning_rate_for,
    make_optimizer,
    make_scheduler,
    norms_and_biases,
)


def parameter(value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def stepped(name: str, gradients: list[float], **kwargs: Any) -> list[float]:
    """The parameter, 1.0 at first, after each of these gradients."""
    weight = parameter()
    optimizer = make_optimizer([weight], OptimizerConfig(name=name, kwargs=kwargs))
    seen = []
    for gradient in gradients:
        weight.grad = torch.tensor([gradient])
        optimizer.step()
        seen.append(weight.item())
    return seen


def test_sgd_golden() -> None:
    # 1 - 0.1 * 2 = 0.8; momentum 0.5 * 2 + 1 = 2: 0.8 - 0.1 * 2 = 0.6.
    assert stepped("sgd", [2.0, 1.0], lr=0.1, momentum=0.5) == pytest.approx([0.8, 0.6])


@pytest.mark.parametrize("fused", [None, False, True])
def test_adam_golden(fused: bool | None) -> None:
    # The first step is lr * sign(g): 0.9. With betas 0, 0 so is each: 0.9 - 0.1 * 3 / 3 = 0.8.
    options = {"lr": 0.1, "eps": 0.0} | ({} if fused is None else {"fused": fused})
    assert stepped("adam", [2.0], betas=[0.9, 0.95], **options) == pytest.approx([0.9])
    assert stepped("adam", [2.0, 3.0], betas=[0.0, 0.0], **options) == pytest.approx([0.9, 0.8])


def test_weight_decay_golden() -> None:
    # AdamW shrinks the weight by lr * 0.5 first: 0.95 - 0.1. Adam adds it to the gradient: only the sign counts.
    options = {"lr": 0.1, "eps": 0.0, "weight_decay": 0.5, "betas": [0.0, 0.0]}
    assert stepped("adamw", [2.0], **options) == pytest.approx([0.85])
    assert stepped("adam", [2.0], **options) == pytest.approx([0.9])


@pytest.mark.parametrize(
    ("name", "kind"), [("adam", torch.optim.Adam), ("AdamW", torch.optim.AdamW), ("sgd", torch.optim.SGD)]
)
def test_names_and_defaults(name: str, kind: type) -> None:
    optimizer = make_optimizer([parameter()], OptimizerConfig(name=name, kwargs={"lr": 0.25}))
    assert type(optimizer) is kind and optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[0]["fused"] is True
    default = make_optimizer([parameter()], OptimizerConfig(name=name)).param_groups[0]
    assert default["lr"] == 3e-5 and (kind is torch.optim.SGD or tuple(default["betas"]) == (0.9, 0.95))


@pytest.mark.parametrize(
    ("weights", "rate"),
    # 1e8^(3/4) = 1e6 and 1e4^(3/4) = 1e3; above 1.6e9 and below 3.7e4 weights the rule ends.
    [(10**8, 8e-6), (10**4, 3e-3), (10**6, 8 / 10**4.5), (10**11, 1e-6), (0, 3e-3)],
)
def test_a_learning_rate_from_the_number_of_weights(weights: int, rate: float) -> None:
    assert learning_rate_for(weights) == pytest.approx(rate)
    assert learning_rate_for(weights, adapter=True) == pytest.approx(
        min(max(10 * 8 / max(weights, 1) ** 0.75, 1e-6), 3e-3)
    )


def test_an_adapter_learns_ten_times_as_fast() -> None:
    """A LoRA on 7B weights: 3.3e-6; it is above the least rate, which the tenth of it is not."""
    assert learning_rate_for(7 * 10**9, adapter=True) == pytest.approx(3.306e-6, rel=1e-3)


def test_the_learning_rate_auto_counts_what_is_trained() -> None:
    config = OptimizerConfig(kwargs={"lr": "auto", "eps": 1e-5})
    given = nn.Parameter(torch.zeros(1000, 1000))
    group = make_optimizer([given], config).param_groups[0]
    assert group["lr"] == pytest.approx(2.53e-4, rel=1e-3) and group["eps"] == 1e-5
    assert make_optimizer([parameter()], config, rate=0.25).param_groups[0]["lr"] == 0.25
    assert config.kwargs["lr"] == "auto"


@pytest.mark.parametrize("changes", [{}, {"model.num_layers_unfrozen": 1}, {"model.peft_config": LORA}])
def test_the_learning_rate_auto_goes_by_the_whole_model(changes: dict[str, Any], tmp_path: Path) -> None:
    """It gives an adapter of any rank ten times as much, see `learning_rate_for`."""
    trainer = make("PPOTrainer", tmp_path, **{"optimizer.kwargs": {"lr": "auto"}, **changes})
    own = [parameter for name, parameter in trainer.model.lm.named_parameters() if "lora" not in name]
    weights = sum(parameter.numel() for parameter in own)
    assert weights_for_rate(trainer.model) == (weights, "model.peft_config" in changes) and weights > 100
    assert trainer.optimisation.optimizer.param_groups[0]["lr"] == 3e-3  # so few weights


def test_what_the_user_says_about_kernels_counts() -> None:
    for given in ({"foreach": True}, {"fused": False}):
        group = make_optimizer([parameter()], OptimizerConfig(name="adamw", kwargs={"lr": 0.1, **given})).param_groups[
            0
        ]
        assert not group["fused"]


def test_parameters_where_no_fused_kernel_is() -> None:
    weight = nn.Parameter(torch.empty(1, device="meta"))
    assert make_optimizer([weight], OptimizerConfig()).param_groups[0]["fused"] is False


def test_every_optimizer_of_torch_lowers_a_parabola() -> None:
    for name in map(str.lower, (*FUSED, *OTHERS)):
        weight = parameter()
        optimizer = make_optimizer([weight], OptimizerConfig(name=name, kwargs={"lr": 0.1}))
        assert type(optimizer).__name__.lower() == name
        for _ in range(3):
            weight.grad = 2 * weight.detach()
            optimizer.step()
        assert 0 < weight.item() < 1, name


def test_names_that_transformers_has_for_our_optimizers() -> None:
    for ours, theirs in TRANSFORMERS.items():
        assert {OPTIMIZERS.canonical(OptimizerNames(name).value) for name in theirs} == {ours}


def rates(name: str, steps: int, total_steps: int | None = None, warmup: float = 0, **kwargs: Any) -> list[float]:
    optimizer = make_optimizer([parameter()], OptimizerConfig(name="sgd", kwargs={"lr": 1.0}))
    scheduler = make_scheduler(optimizer, SchedulerConfig(name=name, warmup=warmup, kwargs=kwargs), total_steps)
    seen = []
    for _ in range(steps):
        seen.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    return seen


def test_schedules_golden() -> None:
    assert rates("constant", 9) == [1.0] * 9
    # (1 + cos(pi t / 4)) / 2.
    assert rates("cosine_annealing", 5, T_max=4) == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466, 0.0])
    assert rates("cosine_annealing", 3, T_max=1.0e12, eta_min=0.5) == pytest.approx([1.0] * 3)
    assert rates("linear", 4, start_factor=1.0, end_factor=0.0, total_iters=2) == pytest.approx([1.0, 0.5, 0.0, 0.0])


def test_schedules_with_warm_up_golden() -> None:
    # Half the rate after one of two steps of warm-up; then from 1 to 0 in the four that are left of six.
    assert rates("linear", 7, total_steps=6, num_warmup_steps=2) == [0, 0.5, 1.0, 0.75, 0.5, 0.25, 0]
    assert rates("linear", 3, total_steps=9, num_training_steps=2) == [1.0, 0.5, 0]  # what is given counts
    assert rates("constant_with_warmup", 4, num_warmup_steps=2) == [0, 0.5, 1.0, 1.0]
    # a fraction is of all steps, rounded up
    assert rates("linear", 7, total_steps=6, num_warmup_steps=0.3) == [0, 0.5, 1.0, 0.75, 0.5, 0.25, 0]
    with pytest.raises(ConfigError, match="warmup_ratio: write scheduler.warmup, of which 0.1 is a tenth"):
        rates("linear", 7, total_steps=6, warmup_ratio=0.1)
    # (1 + cos(pi t / 4)) / 2 after the warm-up.
    cosine = rates("cosine", 6, total_steps=5, num_warmup_steps=1)
    assert cosine == pytest.approx([0, 1.0, 0.8535534, 0.5, 0.1464466, 0])
    # 1 + 0.1 * (1 - 1) = 1 at the start, half way 0.1 + 0.9 / 2, at the end 0.1.
    assert rates("cosine_with_min_lr", 3, total_steps=2, min_lr=0.1) == pytest.approx([1.0, 0.55, 0.1])


def test_the_option_warmup_golden() -> None:
    # Half the rate after one of two steps, as a number or as a third of six; `constant` warms up, too.
    rising = [0, 0.5, 1.0, 0.75, 0.5, 0.25, 0]
    assert rates("linear", 7, 6, warmup=2) == rates("linear", 7, 6, warmup=0.3) == rising
    assert rates("constant", 4, 6, warmup=2) == [0, 0.5, 1.0, 1.0]
    # One step up, three at the full rate, and a straight line down in the last quarter of eight.
    stable = rates("wsd", 9, 8, warmup=1, num_decay_steps=0.25, decay_type="linear")
    assert stable == rates("warmup_stable_decay", 9, 8, 1, num_decay_steps=2, decay_type="linear")
    assert stable == pytest.approx([0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0])
    with pytest.raises(ConfigError, match=r"scheduler\.warmup \(3\) needs one of .*cosine, .* not cosine_annealing"):
        rates("cosine_annealing", 1, 6, warmup=3, T_max=4)


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_norms_and_biases_are_those_of_transformers(family: str) -> None:
    sizes = {"vocab_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    wide = {"hidden_size": 8} if family != "t5" else {"d_model": 8, "d_kv": 4, "d_ff": 8}
    model = AutoModel.from_config(AutoConfig.for_model(family, **sizes, **wide))
    next(model.parameters()).requires_grad = False
    decayed = Trainer.get_decay_parameter_names(cast(Any, None), model)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert norms_and_biases(model) == [name not in decayed for name in trained]
    assert 0 < sum(norms_and_biases(model)) < len(trained)


def test_weight_decay_without_norms_and_biases_golden() -> None:
    network = nn.Sequential(nn.Linear(1, 1), nn.GroupNorm(1, 1))
    config = OptimizerConfig(
        kwargs={"lr": 0.1, "eps": 0.0, "weight_decay": 0.5, "betas": [0.0, 0.0]}, no_decay="norms_and_biases"
    )
    optimizer = make_optimizer(list(network.parameters()), config, norms_and_biases(network))
    assert optimizer.param_groups[0]["fused"] is True
    for weight in network.parameters():
        nn.init.ones_(weight)
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    # lr * 0.5 * 1 for the matrix alone, and lr for all.
    assert [weight.item() for weight in network.parameters()] == pytest.approx([0.85, 0.9, 0.9, 0.9])


@pytest.mark.parametrize(("name", "kwargs"), [("rprop", {"lr": 0.1}), ("adamw", {"lr": 0.1, "weight_decay": 0})])
def test_no_decay_needs_a_weight_decay(name: str, kwargs: dict[str, Any]) -> None:
    config = OptimizerConfig(name=name, kwargs=kwargs, no_decay="norms_and_biases")
    with pytest.raises(ConfigError, match=r"^optimizer\.no_decay .* set optimizer\.kwargs\.weight_decay"):
        optim.try_out(config, SchedulerConfig(), 1)


def test_a_schedule_that_decays_needs_an_end() -> None:
    optimizer = make_optimizer([parameter()], OptimizerConfig())
    with pytest.raises(ConfigError, match=r"scheduler\.kwargs .*num_training_steps"):
        make_scheduler(optimizer, SchedulerConfig(name="cosine"))
    with pytest.raises(ConfigError, match=r"scheduler\.kwargs .*min_rate"):
        make_scheduler(optimizer, SchedulerConfig(name="cosine", kwargs={"min_rate": 0}), 5)
    with pytest.raises(ConfigError, match=r"scheduler\.warmup \(2\) and .*num_warmup_steps are the same"):
        make_scheduler(optimizer, SchedulerConfig(name="cosine", warmup=2, kwargs={"num_warmup_steps": 3}), 5)


def test_a_run_with_warm_up_and_decay_ends_at_zero_and_resumes(tmp_path: Path) -> None:
    options = {"scheduler.name": "cosine", "scheduler.warmup": 0.5, "train.total_steps": 4}
    options["optimizer.no_decay"] = "norms_and_biases"
    auto = {"train.resume_from_checkpoint": "auto"}
    whole = make("SFTTrainer", tmp_path / "whole", **options, **auto)
    whole.learn()
    assert whole.optimisation.scheduler.get_last_lr() == [0.0] * 2
    assert [row["learning_rate"] for row in rows(tmp_path / "whole") if "learning_rate" in row] == pytest.approx(
        [0, 1.5e-3, 3e-3, 1.5e-3]
    )
    run_until_stopped(make("SFTTrainer", tmp_path / "parts", **options, callbacks=[StopAfter(3)]))
    resumed = make("SFTTrainer", tmp_path / "parts", **options, **auto)
    resumed.learn()
    assert_same_run(resumed, whole, tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"lr": 0.1, "lrr": 1}, r"optimizer\.kwargs \(\{'lr': 0\.1, 'lrr': 1\}\): .*lrr"),
        ({"lr": -1.0}, r"optimizer\.kwargs .* [Ii]nvalid learning rate"),
        ({"lr": 0.1, "betas": [2.0, 0.9]}, r"optimizer\.kwargs .* [Ii]nvalid beta"),
    ],
)
def test_optimizer_options_that_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_optimizer([parameter()], OptimizerConfig(name="adamw", kwargs=kwargs))


def test_scheduler_options_that_are_refused() -> None:
    optimizer = make_optimizer([parameter()], OptimizerConfig())
    with pytest.raises(ConfigError, match=r"scheduler\.kwargs \(\{\}\): .*T_max"):
        make_scheduler(optimizer, SchedulerConfig(name="cosine_annealing"))


def test_unknown_names_and_the_nearest() -> None:
    with pytest.raises(RegistryError, match=r"adamx.*adam"):
        OPTIMIZERS.get("adamx")
    with pytest.raises(RegistryError, match=r"cosinus.*Did you mean cosine\?"):
        SCHEDULERS.get("cosinus")


def test_an_optimizer_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "OPTIMIZERS", copy.deepcopy(OPTIMIZERS))

    @optim.OPTIMIZERS.register("backwards")
    def backwards(parameters: Any, **kwargs: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, maximize=True, **kwargs)

    assert stepped("backwards", [2.0], lr=0.1) == pytest.approx([1.2])


EIGHT_BITS = pytest.mark.parametrize("name", ["adam_8bit_bnb", "adamw_8bit_bnb"])


@EIGHT_BITS
def test_8_bit_optimizers_say_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r'^optimizer\.name: 8-bit .* pip install -e "\.\[bitsandbytes\]"\.$'):
        make_optimizer([parameter()], OptimizerConfig(name=name))


@EIGHT_BITS
def test_8_bit_optimizers_step_as_those_of_32_bits(name: str) -> None:
    """Within what 8 bits can tell apart; what is small (below min_8bit_size) is kept in 32."""
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    start, gradients = torch.randn(64, 64), torch.randn(5, 64, 64)
    ends = {}
    for each in (name, name.removesuffix("_8bit_bnb")):
        large, small = nn.Parameter(start.clone()), nn.Parameter(torch.zeros(3))
        optimizer = make_optimizer([large, small], OptimizerConfig(name=each, kwargs={"lr": 0.01}))
        for gradient in gradients:
            large.grad, small.grad = gradient.clone(), gradient[0, :3].clone()
            optimizer.step()
        ends[each] = large.detach() - start
        if each == name:
            assert (optimizer.state[large]["state1"].dtype, optimizer.state[small]["state1"].dtype) == (
                torch.uint8,
                torch.float32,
            )
    got, expected = ends.values()
    assert float((got - expected).norm() / expected.norm()) < 0.1


@EIGHT_BITS
@pytest.mark.parametrize("changes", [{}, {"model.peft_config": {**LORA, "r": 8}}], ids=["whole", "adapter"])
def test_runs_with_8_bit_optimizers_resume(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    options = {"optimizer.name": name, "optimizer.kwargs": {"lr": 3e-3, "min_8bit_size": 16}, **changes}
    auto = {"train.resume_from_checkpoint": "auto"}
    whole = make("DDPOTrainer", tmp_path / "whole", **options, **auto)
    whole.learn()
    assert torch.uint8 in {state["state1"].dtype for state in whole.optimizer.optimizer.state.values()}
    run_until_stopped(make("DDPOTrainer", tmp_path / "parts", **options, callbacks=[StopAfter(3)]))
    resumed = make("DDPOTrainer", tmp_path / "parts", **options, **auto)
    resumed.learn()
    assert_same_run(resumed, whole, tmp_path / "parts", tmp_path / "whole")
