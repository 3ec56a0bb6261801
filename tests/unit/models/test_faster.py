"""Layers that compute the same as before in less time."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import GELUTanh, NewGELUActivation
from transformers.pytorch_utils import Conv1D

from trlx_like.models import faster as module
from trlx_like.models.faster import Choice, choice, faster

KINDS = {
    "linear": lambda: nn.Linear(24, 40),
    "linear without bias": lambda: nn.Linear(24, 40, bias=False),
    "conv1d": lambda: Conv1D(40, 24),
}


PROCESSORS: dict[str, tuple[dict[str, Any], str | None]] = {
    "Zen 5": ({"cpu_name": "AMD EPYC", "avx512_f": True, "avx2": True}, "cpu family\t: 26\n"),
    "Zen 4": ({"cpu_name": "AMD EPYC", "avx512_f": True, "avx2": True}, "cpu family\t: 25\nmodel\t: 17\n"),
    "AMD, no Linux": ({"cpu_name": "AMD EPYC", "avx512_f": True, "avx2": True}, None),
    "Zen 3": ({"cpu_name": "AMD EPYC", "avx512_f": False, "avx2": True}, "cpu family\t: 25\nmodel\t: 1\n"),
    "Xeon": ({"cpu_name": "Intel(R) Xeon(R) Processor", "avx512_f": True, "avx2": True}, "cpu family\t: 6\n"),
    "Core": ({"cpu_name": "Intel Core", "avx512_f": False, "avx2": True}, "cpu family\t: 6\n"),
    "old": ({"cpu_name": "AMD Phenom", "avx512_f": False, "avx2": False}, "cpu family\t: 16\n"),
    "ARM": ({"architecture": "aarch64"}, "processor\t: 0\n"),
}
"""What torch tells of a processor, and what Linux adds."""


def choose(processor: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Choice:
    """What would be chosen on a processor."""
    capabilities, told = PROCESSORS[processor]
    with monkeypatch.context() as there:
        there.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)  # torch 2.9 lacks it
        there.setattr(module, "CPUINFO", folder / processor)
        if told is not None:
            (folder / processor).write_text(f"processor\t: 0\n{told}", encoding="utf-8")
        return choice.__wrapped__()


def on(processor: str, least: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Choose as on a processor, with another least size of weights."""
    made = choose(processor, monkeypatch, folder)._replace(least=least)
    monkeypatch.setattr(module, "choice", lambda: made)


@pytest.fixture(autouse=True)
def every_product(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Choose oneDNN on any processor, for products of any size."""
    on("Zen 5", 0, monkeypatch, tmp_path)
    monkeypatch.setattr(module, "LEAST_PRODUCT", 1)


def layer(kind: str) -> Any:
    torch.manual_seed(0)
    made = KINDS[kind]()
    for weight in made.parameters():
        nn.init.normal_(weight)
    return made


def gradients(made: Any, states: Tensor, factor: Tensor) -> list[Tensor]:
    """Return the output of a layer and the gradients of states and weights."""
    states = states.clone().requires_grad_()
    out = made(states)
    (out * factor).sum().backward()
    return [out.detach(), states.grad, *(weight.grad for weight in made.parameters())]


def products(counted: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the shapes of the products of oneDNN."""
    seen: list[tuple[int, ...]] = []
    plain = module.product

    def record(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append((*rows.shape, weight.shape[0]))
        return plain(rows, weight, bias)

    counted.setattr(module, "product", record)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_in_float64(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = products(monkeypatch)
    exact, quick = layer(kind).double(), faster(layer(kind))
    states, factor = torch.randn(3, 7, 24), torch.randn(3, 7, 40)
    found = gradients(quick, states, factor)
    assert seen == [(21, 24, 40), (21, 40, 24), (24, 21, 40) if kind == "conv1d" else (40, 21, 24)]
    for value, right in zip(found, gradients(exact, states.double(), factor.double()), strict=True):
        torch.testing.assert_close(value.double(), right, rtol=0, atol=2e-5)
    with torch.inference_mode():
        assert torch.equal(quick(states), found[0]) and len(seen) == 4


@pytest.mark.parametrize(
    ("made", "rows", "copied"),
    [
        (nn.Linear(24, 40), 50, (40, 50, 24)),  # 40 * 50 numbers of a gradient, or 24 * 50 states and 24 * 40 weights
        (nn.Linear(24, 40), 70, (24, 70, 40)),
        (Conv1D(24, 40), 50, (40, 50, 24)),
        (Conv1D(24, 40), 70, (24, 70, 40)),
    ],
)
def test_the_gradient_of_a_weight_copies_the_fewest_numbers(
    made: Any, rows: int, copied: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ins = 40 if isinstance(made, Conv1D) else 24
    states, factor = torch.randn(rows, ins), torch.randn(rows, 64 - ins)
    right = gradients(copy.deepcopy(made).double(), states.double(), factor.double())
    seen = products(monkeypatch)
    for value, wanted in zip(gradients(faster(made), states, factor), right, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=0, atol=5e-5)
    assert seen[2] == copied and made.weight.grad.stride() == made.weight.stride()


@pytest.mark.parametrize("kind", KINDS)
def test_states_and_gradients_may_have_any_strides(kind: str) -> None:
    plain, quick = layer(kind), faster(layer(kind))
    states = torch.randn(24, 7, 3).transpose(0, 2)[:, ::2]  # [3, 4, 24]
    for factor in (torch.randn(40, 4, 3).transpose(0, 2), torch.tensor(2.0)):  # the latter gives a gradient of stride 0
        right = gradients(plain, states.contiguous(), factor)
        for value, wanted in zip(gradients(quick, states, factor), right, strict=True):
            torch.testing.assert_close(value, wanted, rtol=0, atol=2e-5)
        assert [weight.grad.stride() for weight in quick.parameters()] == [w.stride() for w in quick.parameters()]
        quick.zero_grad(), plain.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_is_neither_computed_nor_kept(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    seen, quick, states = products(monkeypatch), faster(layer(kind)), torch.randn(5, 24)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        quick(states).sum().backward()
        assert [tensor.data_ptr() for tensor in kept] == [states.data_ptr()] and len(seen) == 2
        kept.clear()
        quick.requires_grad_(False)
        quick(states.requires_grad_()).sum().backward()
    assert [tensor.data_ptr() for tensor in kept] == [quick.weight.data_ptr()] and len(seen) == 4
    assert states.grad is not None


@pytest.mark.parametrize("kind", KINDS)
def test_other_number_formats_stay_with_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, plain, quick, states = products(monkeypatch), layer(kind), faster(layer(kind)), torch.randn(5, 24)
    for dtype in (torch.bfloat16, torch.float64):
        assert torch.equal(quick.to(dtype)(states.to(dtype)), plain.to(dtype)(states.to(dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        assert quick.float()(states).dtype == torch.bfloat16
    assert not seen


def test_small_products_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_PRODUCT", 5 * 24 * 40)
    seen, plain, quick, states = products(monkeypatch), layer("linear"), faster(layer("linear")), torch.randn(5, 24)
    assert torch.equal(quick(states[:4]), plain(states[:4])) and not seen
    quick(states)
    assert seen == [(5, 24, 40)]


def test_a_row_does_not_depend_on_the_others() -> None:
    quick, states = faster(layer("linear")), torch.randn(64, 24)
    for count in (1, 7, 33):
        torch.testing.assert_close(quick(states[:count]), quick(states)[:count], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [NewGELUActivation, GELUTanh])
def test_gelu_and_its_gradient_are_those_in_float64(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quick, exact = faster(nn.Sequential(kind()))[0], nn.GELU(approximate="tanh")
    assert isinstance(quick, nn.GELU)
    states = torch.linspace(-20, 20, 3001, requires_grad=True)
    wide = states.detach().double().requires_grad_()
    made = quick(states)
    (made * states.detach()).sum().backward()
    (exact(wide) * wide.detach()).sum().backward()
    torch.testing.assert_close(made.double(), exact(wide), rtol=1e-6, atol=1e-6)
    assert states.grad is not None
    torch.testing.assert_close(states.grad.double(), wide.grad, rtol=1e-6, atol=2e-5)
    with torch.no_grad():
        assert torch.equal(quick(states), made)
    for other in (states.detach().bfloat16(), wide.detach()):
        assert torch.equal(quick(other), exact(other))
    monkeypatch.setattr(module, "LEAST_PRODUCT", 2**20)
    assert torch.equal(quick(states), exact(states))


@pytest.mark.parametrize(
    ("shape", "grad", "sigmoids"), [((32, 1, 200), False, 1), ((2, 1, 200), False, 0), ((32, 1, 200), True, 0)]
)
def test_a_sigmoid_is_faster_for_fewer_numbers_in_a_step_of_decoding(
    shape: tuple[int, ...], grad: bool, sigmoids: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other passes of so few numbers, whose results trainers compare with each other, take torch's GELU."""
    monkeypatch.setattr(module, "LEAST_ACTIVATED", 2**16)
    calls, inner = list[int](), module._inner

    def count(states: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        calls.append(states.numel())
        return inner(states, out)

    monkeypatch.setattr(module, "_inner", count)
    quick, states = faster(nn.Sequential(NewGELUActivation()))[0], torch.randn(shape)
    with torch.set_grad_enabled(grad):
        made = quick(states)
        assert len(calls) == sigmoids
        quick(states.view(1, -1, shape[2]))
    assert len(calls) == sigmoids
    torch.testing.assert_close(made, nn.GELU(approximate="tanh")(states), rtol=1e-6, atol=1e-6)


def test_the_layers_are_what_they_were() -> None:
    model = nn.Sequential(layer("linear"), nn.ReLU(), nn.Sequential(layer("conv1d")))
    before = copy.deepcopy(model)
    quick = faster(model)
    assert quick is model and isinstance(quick[0], nn.Linear) and isinstance(quick[2][0], Conv1D)  # type: ignore[index]
    again = copy.deepcopy(quick)
    again.load_state_dict(before.state_dict())
    assert list(again.state_dict()) == list(before.state_dict())


def test_layers_of_other_classes_are_left_alone() -> None:
    class Own(nn.Linear):
        """A layer that may compute something else, as those of peft and bitsandbytes do."""

    made = Own(24, 40)
    assert type(faster(nn.Sequential(made))[0]) is Own


def test_on_another_processor_nothing_changes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on("ARM", 0, monkeypatch, tmp_path)
    assert type(faster(layer("linear"))) is nn.Linear


def test_small_weights_stay_with_mkl_where_512_bits_are_two_halves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on("Zen 4", 24 * 40, monkeypatch, tmp_path)
    seen, made = products(monkeypatch), faster(nn.Sequential(layer("linear"), Conv1D(24, 40), nn.Linear(24, 39)))
    assert made(torch.randn(3, 24)).shape == (3, 39) and seen == [(3, 24, 40), (3, 40, 24)]
    assert type(made[2]) is nn.Linear


@pytest.mark.parametrize("grad", [False, True])
def test_few_rows_and_a_large_weight_on_intels_processors(
    grad: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A step of decoding takes oneDNN. One row, many rows, small weights, `Conv1D` and learning stay with MKL."""
    on("Xeon", 24 * 40, monkeypatch, tmp_path)
    seen, made = products(monkeypatch), faster(nn.Sequential(layer("linear"), nn.Linear(40, 8), Conv1D(40, 8)))
    exact = copy.deepcopy(made).double()
    with torch.set_grad_enabled(grad):
        for rows in (1, 3, 4, 32, 33):
            states = torch.randn(rows, 1, 24)
            torch.testing.assert_close(made(states).double(), exact(states.double()), rtol=0, atol=5e-5)
    assert seen == ([] if grad else [(4, 24, 40), (32, 24, 40)])


def test_no_gradient_takes_onednn_on_amds_processors_without_avx512(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One row, small weights and `Conv1D` stay with MKL, and so do gradients, frozen or not."""
    on("Zen 3", 24 * 40, monkeypatch, tmp_path)
    seen, made = products(monkeypatch), faster(nn.Sequential(layer("linear"), nn.Linear(40, 8), Conv1D(40, 8)))
    exact = copy.deepcopy(made).double()
    for rows in (3, 4, 70):
        states, factor = torch.randn(rows, 1, 24), torch.randn(rows, 1, 40)
        found, right = gradients(made, states, factor), gradients(exact, states.double(), factor.double())
        for value, wanted in zip(found, right, strict=True):
            torch.testing.assert_close(value.double(), wanted, rtol=0, atol=5e-5)
        made.zero_grad()
        exact.zero_grad()
    frozen, states = faster(layer("linear").requires_grad_(False)), torch.randn(5, 24, requires_grad=True)
    frozen(states).sum().backward()
    torch.testing.assert_close(states.grad, frozen.weight.sum(dim=0).expand(5, 24), rtol=0, atol=2e-5)
    assert seen == [(4, 24, 40), (70, 24, 40), (5, 24, 40)]


@pytest.mark.parametrize(
    ("processor", "layers", "least", "words"),
    [
        ("Zen 5", {nn.Linear, Conv1D}, 0, "oneDNN$"),
        ("Zen 4", {nn.Linear, Conv1D}, 2**19, "oneDNN for weights of 524,288 numbers"),
        ("AMD, no Linux", {nn.Linear, Conv1D}, 2**19, "oneDNN for weights of 524,288 numbers"),
        ("Zen 3", {nn.Linear}, 2**20, "MKL; oneDNN for 4 rows or more and large weights"),
        ("Xeon", {nn.Linear}, 2**20, "MKL; oneDNN for 4 to 32 rows and large weights"),
        ("Core", set(), 0, "torch's own choice"),
        ("old", set(), 0, "torch's own choice"),
        ("ARM", set(), 0, "torch's own choice"),
    ],
)
def test_what_is_faster_on_a_processor(
    processor: str,
    layers: set[type[nn.Module]],
    least: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = choose(processor, monkeypatch, tmp_path)
    assert (set(made.kinds), made.least) == (layers, least) and re.match(words, made.words)
