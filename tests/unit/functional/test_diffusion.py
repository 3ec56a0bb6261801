"""Denoising steps as Gaussians."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tests.unit.functional import diffusion_numpy as twin
from tests.unit.functional.properties import NUMBERS, QUICK
from trlx_like.functional import diffusion as df

PREDICTIONS = ("epsilon", "v_prediction", "sample")
LEVELS = st.tuples(st.floats(0.01, 0.95), st.floats(0.02, 0.99)).filter(lambda pair: pair[1] - pair[0] > 0.01)


def number(value: float) -> Tensor:
    """A level of noise, for one row."""
    return torch.tensor([[value]], dtype=torch.float64)


def rows(values: list[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


# a = 0.64: roots 0.8 and 0.6. a' = 0.81: roots 0.9 and sqrt 0.19. x = 1.


def test_clean_and_noise_golden() -> None:
    # epsilon 0.5: x0 = (1 - 0.6 * 0.5) / 0.8 = 0.875.
    # sample 0.5: e = (1 - 0.8 * 0.5) / 0.6 = 1.
    # v 0.5: x0 = 0.8 - 0.6 * 0.5 = 0.5, e = 0.8 * 0.5 + 0.6 = 1.
    expected = {"epsilon": (0.875, 0.5), "sample": (0.5, 1.0), "v_prediction": (0.5, 1.0)}
    for prediction, pair in expected.items():
        clean, noise = df.clean_and_noise(rows([0.5]), rows([1.0]), number(0.64), prediction)  # type: ignore[arg-type]
        assert (clean.item(), noise.item()) == pytest.approx(pair, abs=1e-12)


def test_ddim_golden() -> None:
    # s^2 = 0.19 / 0.36 * (1 - 0.64 / 0.81) = 0.5277778 * 0.2098765 = 0.1107682, s = 0.3328185.
    # mean = 0.9 * 0.875 + sqrt(0.19 - 0.1107682) * 0.5 = 0.7875 + 0.2814815 * 0.5 = 0.9282407.
    std = df.ddim_std(number(0.64), number(0.81), 1.0)
    mean = df.ddim_mean(rows([0.875]), rows([0.5]), number(0.81), std)
    assert std.item() == pytest.approx(0.3328185, abs=1e-7)
    assert mean.item() == pytest.approx(0.9282407, abs=1e-7)
    # Half the noise: s = 0.1664093, and sqrt(0.19 - 0.0276920) = 0.4028746 goes with e.
    std = df.ddim_std(number(0.64), number(0.81), 0.5)
    mean = df.ddim_mean(rows([0.875]), rows([0.5]), number(0.81), std)
    assert (std.item(), mean.item()) == pytest.approx((0.1664093, 0.7875 + 0.2014373), abs=1e-7)
    # None: all of sqrt 0.19 = 0.4358899 goes with e.
    none = df.ddim_std(number(0.64), number(0.81), 0.0)
    assert df.ddim_mean(rows([0.875]), rows([0.5]), number(0.81), none).item() == pytest.approx(1.0054449, abs=1e-7)


def test_flow_golden() -> None:
    # sigma 0.8 -> 0.6: g = 0.7 sqrt(0.8 / 0.2) = 1.4, s = 1.4 sqrt 0.2 = 0.6260990, g^2 / (2 sigma) = 1.225.
    # mean = (1 - 1.225 * 0.2) * 1 - (1 + 1.225 * 0.2) * 0.2 * 0.5 = 0.755 - 0.1245 = 0.6305.
    sigma, after = number(0.8), number(0.6)
    rate = df.flow_sde_rate(sigma, 0.7, 0.9)
    assert rate.item() == pytest.approx(1.4, abs=1e-12)
    assert df.flow_sde_std(rate, sigma, after).item() == pytest.approx(0.6260990, abs=1e-7)
    assert df.flow_sde_mean(rows([0.5]), rows([1.0]), rate, sigma, after).item() == pytest.approx(0.6305, abs=1e-12)
    # From x = 2: 0.755 * 2 - 0.1245 = 1.3855.
    assert df.flow_sde_mean(rows([0.5]), rows([2.0]), rate, sigma, after).item() == pytest.approx(1.3855, abs=1e-12)
    # Pure noise: 1 - sigma is that of the second step, 1 - 0.9. g = 0.7 sqrt(1 / 0.1) = 2.2135944.
    assert df.flow_sde_rate(number(1.0), 0.7, 0.9).item() == pytest.approx(2.2135944, abs=1e-7)


def test_logprob_golden() -> None:
    # z = (1 - 0.9282407) / 0.3328185 = 0.2156108: -0.0232440 + 1.1001580 - 0.9189385 = 0.1579754.
    # A second dimension at the mean: 1.1001580 - 0.9189385 = 0.1812194. Their mean: 0.1695974.
    x, mean = rows([1.0, 0.9282407]), rows([0.9282407, 0.9282407])
    assert df.gaussian_logprob(x, mean, number(0.3328185)).item() == pytest.approx(0.1695974, abs=1e-6)


def test_kl_golden() -> None:
    # ((1 - 0)^2 + (3 - 1)^2) / (2 * 0.5^2) / 2 = (2 + 8) / 2 = 5.
    assert df.gaussian_kl(rows([1.0, 3.0]), rows([0.0, 1.0]), number(0.5)).item() == 5


def test_levels_that_are_equal_up_to_rounding_leave_no_noise() -> None:
    """1 - a / a' is then -2e-16, and its root would be NaN."""
    above = np.nextafter(0.81, 1)
    assert 1 - above / 0.81 < 0
    assert df.ddim_std(number(above), number(0.81), 1.0).item() == 0


def test_images_are_averaged_over_all_dimensions() -> None:
    """Two rows of two channels of one by two pixels, each row with its own deviation, 1 and 2.

    Distances 0 1 2 3 in the first, 0 2 4 6 in the second: squares over s^2 are 0 1 4 9, whose half has the mean 1.75.
    """
    x = torch.arange(4, dtype=torch.float64).reshape(1, 2, 1, 2) * torch.tensor([1.0, 2.0]).reshape(2, 1, 1, 1)
    std = torch.tensor([1.0, 2.0], dtype=torch.float64).reshape(2, 1, 1, 1)
    assert df.gaussian_kl(x, torch.zeros_like(x), std).tolist() == [1.75, 1.75]
    found = df.gaussian_logprob(x, torch.zeros_like(x), std)
    # log sqrt(2 pi) = 0.9189385, ln 2 = 0.6931472
    assert found.tolist() == pytest.approx([-1.75 - 0.9189385, -1.75 - 0.9189385 - 0.6931472], abs=1e-6)


def test_guided_golden() -> None:
    assert df.guided(rows([1.0]), rows([3.0]), 5.0).item() == 11
    assert df.guided(rows([1.0]), rows([2.0]), 5.0).item() == 6
    assert df.guided(rows([1.0]), rows([2.0]), 1.0).item() == 2


@QUICK
@given(st.lists(NUMBERS, min_size=4, max_size=4), LEVELS, st.sampled_from(PREDICTIONS))
def test_eta_1_is_the_posterior_of_the_forward_process(
    values: list[float], levels: tuple[float, float], p: str
) -> None:
    a, a_prev = levels
    x, output = rows(values[:2]), rows(values[2:])
    clean, noise = df.clean_and_noise(output, x, number(a), p)  # type: ignore[arg-type]
    std = df.ddim_std(number(a), number(a_prev), 1.0)
    x0, e = twin.believed(output.numpy(), x.numpy(), a, p)
    mean, deviation = twin.ancestral(x0, x.numpy(), a, a_prev)
    np.testing.assert_allclose(clean.numpy(), x0, atol=1e-9)
    np.testing.assert_allclose(noise.numpy(), e, atol=1e-9)
    assert std.item() == pytest.approx(deviation, rel=1e-9)
    np.testing.assert_allclose(df.ddim_mean(clean, noise, number(a_prev), std).numpy(), mean, atol=1e-8)


@QUICK
@given(st.lists(NUMBERS, min_size=6, max_size=6), st.floats(0.05, 2))
def test_density_and_divergence_against_the_twin(values: list[float], deviation: float) -> None:
    x, mean, other = torch.tensor(values, dtype=torch.float64).reshape(3, 2, 1)
    std = number(deviation)
    got = df.gaussian_logprob(mean + deviation * x, mean, std)
    np.testing.assert_allclose(got.numpy(), twin.logprob((mean + deviation * x).numpy(), mean.numpy(), deviation))
    got = df.gaussian_kl(mean, other, std)
    np.testing.assert_allclose(got.numpy(), twin.kl(mean.numpy(), other.numpy(), deviation), atol=1e-9, rtol=1e-6)
    assert (got >= 0).all()


def test_nothing_is_nan_where_a_step_is_certain() -> None:
    """s = 0: no density, and no gradient from one; as the last step of many schedules."""
    mean = torch.ones(2, 3, requires_grad=True)
    std = torch.tensor([[0.0], [1.0]])
    found = df.gaussian_logprob(torch.zeros(2, 3), mean, std) + df.gaussian_kl(mean, torch.zeros(2, 3), std)
    assert found[0] == 0
    found.sum().backward()
    assert mean.grad is not None
    assert mean.grad[0].tolist() == [0, 0, 0]
    assert mean.grad.isfinite().all()


def test_no_signal_and_full_noise_leave_no_negative_root() -> None:
    """a = 0 and eta = 1: s^2 is 1 - a', and what is left for e is 0, however it rounds."""
    for a_prev in torch.linspace(0.001, 0.999, 97, dtype=torch.float64):
        std = df.ddim_std(number(0.0), a_prev, 1.0)
        assert df.ddim_mean(rows([0.0]), rows([1.0]), a_prev, std).item() == pytest.approx(0, abs=1e-7)
