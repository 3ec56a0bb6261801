"""Schedules of denoising steps: against diffusers, against Gaussian data, and at both ends."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, FlowMatchEulerDiscreteScheduler, PNDMScheduler
from torch import Tensor

from trlx_like.errors import ConfigError
from trlx_like.samplers.schedules import DDIMSchedule, FlowSchedule, Schedule

KINDS = [
    {"prediction_type": prediction, "timestep_spacing": spacing, "steps_offset": offset, "set_alpha_to_one": one}
    for prediction, spacing, offset, one in itertools.product(
        ("epsilon", "v_prediction", "sample"), ("leading", "trailing", "linspace"), (0, 1), (True, False)
    )
]
SD15 = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "set_alpha_to_one": False}
SD15 |= {"steps_offset": 1, "clip_sample": False}


def scheduler(**settings: Any) -> DDIMScheduler:
    return DDIMScheduler(**{"clip_sample": False, **settings})


def all_steps(schedule: Schedule, x: Tensor, model: Any) -> Tensor:
    """From noise x to an image, with a model of (x, the number of the step)."""
    for number in range(len(schedule)):
        x = schedule.step(model(x, number), torch.full((len(x),), number), x).prev
    return x


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(str(value) for value in kind.values()))
@pytest.mark.parametrize("steps", [1, 7])
def test_finite_from_end_to_end(kind: dict[str, Any], steps: int) -> None:
    schedule = DDIMSchedule(scheduler(**kind), steps, eta=1.0)
    torch.manual_seed(0)
    x = torch.randn(2, 1, 4, 4)
    for number in range(steps):
        done = schedule.step(0.1 * x, torch.full((2,), number), x)
        again = schedule.step(0.1 * x, torch.full((2,), number), x, prev=done.prev)
        assert all(value.isfinite().all() for value in done)
        assert torch.equal(again.logprob, done.logprob)
        assert torch.equal(again.prev, done.prev)
        x = done.prev
    # The last step is certain where it leads to the data itself, or starts at the level of noise where it should end.
    last_is_certain = kind["set_alpha_to_one"] or schedule.timesteps[-1] == 0
    assert schedule.stochastic_steps.tolist() == list(range(steps - 1 if last_is_certain else steps))


@pytest.mark.parametrize(
    "kind",
    [k for k in KINDS if k["timestep_spacing"] != "linspace"],
    ids=lambda kind: "-".join(map(str, kind.values())),
)
@pytest.mark.parametrize("clip", [{}, {"clip_sample": True, "clip_sample_range": 0.5}])
@pytest.mark.parametrize("derived", [False, True])
@pytest.mark.parametrize("eta", [0.0, 0.7])
def test_the_steps_of_diffusers(kind: dict[str, Any], clip: dict[str, Any], derived: bool, eta: float) -> None:
    """eta 0 is diffusers' own `step`; with noise its mean is, which it gives for noise of 0."""
    theirs: Any = scheduler(**{**SD15, **kind, **clip})
    ours = DDIMSchedule(theirs, 10, eta, use_clipped_model_output=derived)
    theirs.set_timesteps(10)
    assert ours.timesteps.tolist() == theirs.timesteps.tolist()
    torch.manual_seed(0)
    for number, t in enumerate(theirs.timesteps):
        output, x = torch.randn(2, 3, 1, 4, 4)
        none = torch.zeros_like(x)
        options = {"eta": eta, "use_clipped_model_output": derived, "variance_noise": none if eta else None}
        expected = theirs.step(output, int(t), x, **options).prev_sample
        got = ours.step(output, torch.full((3,), number), x)
        torch.testing.assert_close(got.mean, expected, rtol=1e-4, atol=1e-4)
        if eta == 0:
            assert torch.equal(got.prev, got.mean)
            assert got.logprob.tolist() == [0, 0, 0]


def test_linspace_leads_to_where_the_next_step_starts() -> None:
    """10 of 1000 steps: 999, 888, ... are 111 apart. diffusers' step from 999 would lead to 999 - 1000 // 10 = 899."""
    theirs: Any = scheduler(timestep_spacing="linspace")
    ours = DDIMSchedule(theirs, 10, 0.0)
    assert ours.timesteps.tolist() == [999, 888, 777, 666, 555, 444, 333, 222, 111, 0]
    assert ours.alphas_prev[0] == theirs.alphas_cumprod[888].double()


def test_zero_terminal_snr() -> None:
    zero = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    for prediction, steps in itertools.product(("v_prediction", "sample"), (1, 10)):
        schedule = DDIMSchedule(scheduler(**zero, prediction_type=prediction), steps, 1.0)
        assert schedule.alphas[0] == 0
        image = all_steps(schedule, torch.randn(2, 1, 4, 4), lambda x, _: 0.1 * x)
        assert image.isfinite().all()
    with pytest.raises(ConfigError, match=r"no signal left at step 999 .* v_prediction or sample"):
        DDIMSchedule(scheduler(**zero), 10, 1.0)
    DDIMSchedule(scheduler(rescale_betas_zero_snr=True), 10, 1.0)  # spacing "leading" begins below it, at 900


def gaussian(mean: float, std: float, levels: Tensor, prediction: str) -> Any:
    """The best possible model of data ~ N(mean, std^2) at each of a DDIM schedule's levels."""

    def model(x: Tensor, number: int) -> Tensor:
        a = float(levels[number])
        gain = std**2 * a**0.5 / (std**2 * a + 1 - a)
        clean = mean + gain * (x - a**0.5 * mean)
        noise = (x - a**0.5 * clean) / (1 - a) ** 0.5
        velocity = a**0.5 * noise - (1 - a) ** 0.5 * clean
        return {"epsilon": noise, "sample": clean, "v_prediction": velocity}[prediction]

    return model


def ends_at(schedule: Schedule, model: Any) -> tuple[float, float]:
    """Mean and deviation of what N(0, 1) becomes, exactly: each step is a x + b + s z, read off at x = 0 and x = 1."""
    mean, variance = 0.0, 1.0
    for number in range(len(schedule)):
        x = torch.tensor([[0.0], [1.0]])
        done = schedule.step(model(x, number), torch.full((2,), number), x)
        (b, one), s = done.mean.flatten().tolist(), float(done.std[0])
        mean, variance = (one - b) * mean + b, (one - b) ** 2 * variance + s**2
    return mean, variance**0.5


@pytest.mark.parametrize("eta", [0.0, 1.0])
@pytest.mark.parametrize(
    ("prediction", "spacing"),
    [
        pytest.param(prediction, spacing, marks=[pytest.mark.slow] * (at_prediction != at_spacing))
        for at_prediction, prediction in enumerate(("epsilon", "v_prediction", "sample"))
        for at_spacing, spacing in enumerate(("leading", "trailing", "linspace"))
    ],
)
def test_ddim_ends_at_the_data(prediction: str, spacing: str, eta: float) -> None:
    """In the limit of small steps, so with as many as there are: with 250 and eta 1 the deviation is still .287."""
    made = scheduler(prediction_type=prediction, timestep_spacing=spacing)
    schedule = DDIMSchedule(made, 1000, eta)
    model = gaussian(0.5, 0.3, schedule.alphas, prediction)
    assert ends_at(schedule, model) == pytest.approx((0.5, 0.3), abs=0.005)


def velocity(schedule: FlowSchedule) -> Any:
    """E[e - x0 | x] of data ~ N(0.5, 0.3^2)."""

    def model(x: Tensor, number: int) -> Tensor:
        s = float(schedule.sigmas[number])
        residual = (x - (1 - s) * 0.5) / ((1 - s) ** 2 * 0.09 + s**2)
        return s * residual - (0.5 + (1 - s) * 0.09 * residual)

    return model


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("level", [0.0, 0.7])
def test_flow_ends_at_the_data(shift: float, level: float) -> None:
    schedule = FlowSchedule(FlowMatchEulerDiscreteScheduler(shift=shift), 400, level)
    assert ends_at(schedule, velocity(schedule)) == pytest.approx((0.5, 0.3), abs=0.005)


def test_what_is_drawn_has_these_marginals() -> None:
    """40,000 numbers: four standard errors of their mean are .006, and of their deviation .004."""
    ddim, flow = DDIMSchedule(scheduler(), 50, 1.0), FlowSchedule(FlowMatchEulerDiscreteScheduler(), 50, 0.7)
    pairs: list[tuple[Schedule, Any]] = [(ddim, gaussian(0.5, 0.3, ddim.alphas, "epsilon")), (flow, velocity(flow))]
    torch.manual_seed(0)
    for schedule, model in pairs:
        image = all_steps(schedule, torch.randn(40_000, 1), model)
        mean, std = ends_at(schedule, model)
        assert image.mean().item() == pytest.approx(mean, abs=0.006)
        assert image.std().item() == pytest.approx(std, abs=0.004)


def test_flow_without_noise_is_the_step_of_diffusers() -> None:
    theirs: Any = FlowMatchEulerDiscreteScheduler(shift=3.0)
    schedule = FlowSchedule(theirs, 5, 0.0)
    theirs.set_timesteps(5)
    assert schedule.stochastic_steps.tolist() == []
    for number, t in enumerate(theirs.timesteps):
        output, x = torch.randn(2, 3, 1, 4, 4)
        got = schedule.step(output, torch.full((3,), number), x)
        torch.testing.assert_close(got.prev, theirs.step(output, t, x).prev_sample)
        assert float(schedule.times(torch.tensor([number]))) == float(t)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("flow", [False, True])
def test_what_is_returned_is_what_was_scored(dtype: torch.dtype, flow: bool) -> None:
    """In half precision x' is rounded first: scoring it again gives the same number, and a ratio of exactly 1."""
    schedule: Schedule = DDIMSchedule(scheduler(**SD15), 20, 1.0)
    if flow:
        schedule = FlowSchedule(FlowMatchEulerDiscreteScheduler(), 20, 0.7)
    torch.manual_seed(0)
    x = torch.randn(4, 3, 4, 4).to(dtype)
    for number in range(20):
        t, output = torch.full((4,), number), torch.randn(4, 3, 4, 4).to(dtype)
        drawn = schedule.step(output, t, x)
        scored = schedule.step(output, t, x, prev=drawn.prev)
        assert drawn.prev.dtype == dtype
        assert torch.equal((scored.logprob - drawn.logprob).exp(), torch.ones(4))
        x = drawn.prev


def test_rows_may_be_at_different_steps() -> None:
    schedule = DDIMSchedule(scheduler(**SD15), 5, 1.0)
    output, x, prev = torch.randn(3, 4, 2, 2, 2)
    t = torch.tensor([3, 0, 4, 3])
    together = schedule.step(output, t, x, prev)
    for row in range(4):
        alone = schedule.step(*(v[row : row + 1] for v in (output, t, x, prev)))
        for got, expected in zip(together, alone, strict=True):
            torch.testing.assert_close(got[row : row + 1], expected)


def test_settings_of_other_schedulers() -> None:
    """Those that pipelines come with. Where they cannot clip, DDIM does not, although it would by default."""
    pndm = PNDMScheduler(skip_prk_steps=True, steps_offset=1, beta_schedule="scaled_linear")
    assert DDIMSchedule(pndm, 10, 1.0).timesteps.tolist() == [901, 801, 701, 601, 501, 401, 301, 201, 101, 1]
    assert DDIMSchedule(pndm, 10, 1.0).limit is None
    euler = EulerDiscreteScheduler(prediction_type="v_prediction", timestep_spacing="trailing")
    assert DDIMSchedule(euler, 2, 1.0).timesteps.tolist() == [999, 499]
    assert DDIMSchedule(DDIMScheduler(clip_sample_range=2.0), 2, 1.0).limit == 2.0


def test_what_cannot_be_trained_with() -> None:
    with pytest.raises(ConfigError, match=r"method.num_inference_steps \(1001\) is above the 1000"):
        DDIMSchedule(scheduler(), 1001, 1.0)
    with pytest.raises(ConfigError, match="thresholding: true"):
        DDIMSchedule(scheduler(thresholding=True), 10, 1.0)
    with pytest.raises(ConfigError, match="prediction_type 'flow_prediction'"):
        DDIMSchedule(scheduler(prediction_type="flow_prediction"), 10, 1.0)
    with pytest.raises(ConfigError, match="use_dynamic_shifting or invert_sigmas"):
        FlowSchedule(FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), 10, 0.7)
