"""Gradients of embeddings that are added by rows, beside those of torch and those by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.contract.recipes import make
from trlx_like.distributed import embeddings as module
from trlx_like.distributed.embeddings import _RowEmbedding, add_by_rows

V, H = 11, 3


@pytest.fixture(autouse=True, scope="module")
def of_any_size() -> Iterator[None]:
    """Small weights are added by rows too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LEAST", 1)
        yield


def pair(padding: int | None = None, **options: Any) -> tuple[nn.Embedding, nn.Embedding]:
    """Equal embeddings [V, H] in float64: torch's, and one that adds by rows."""
    torch.manual_seed(0)
    made = [nn.Embedding(V, H, padding_idx=padding, dtype=torch.float64, **options) for _ in range(2)]
    made[1].load_state_dict(made[0].state_dict())
    add_by_rows(nn.ModuleList([made[1]]))
    return made[0], made[1]


def loss(embedding: nn.Embedding, ids: Tensor, tied: bool) -> Tensor:
    """A number that depends on the rows, and on the whole weight if that is the head too."""
    states = embedding(ids).tanh()
    return ((states @ embedding.weight.t() if tied else states) ** 2).sum()


def gradient(embedding: nn.Embedding) -> Tensor:
    assert embedding.weight.grad is not None
    return embedding.weight.grad


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(
        st.lists(st.lists(st.integers(0, V - 1), min_size=4, max_size=4), min_size=1, max_size=3),
        min_size=1,
        max_size=3,
    ),
    padding=st.sampled_from([None, 0, 5]),
    tied=st.booleans(),
)
def test_gradients_are_those_of_torch(batches: list[list[list[int]]], padding: int | None, tied: bool) -> None:
    plain, rows = pair(padding)
    for batch in batches:  # each is a micro-batch, whose gradient is added to the others
        for embedding in (plain, rows):
            loss(embedding, torch.tensor(batch), tied).backward()
    torch.testing.assert_close(gradient(rows), gradient(plain), rtol=1e-12, atol=1e-12)


def test_gradients_by_hand() -> None:
    """A token that comes twice gets both gradients, and padding none."""
    _, rows = pair(padding=4)
    ids, weights = torch.tensor([[1, 4, 1], [2, 1, 4]]), torch.randn(2, 3, H, dtype=torch.float64)
    (rows(ids) * weights).sum().backward()
    expected = np.zeros((V, H))
    np.add.at(expected, ids.numpy(), weights.numpy())
    expected[4] = 0
    np.testing.assert_allclose(gradient(rows).numpy(), expected, rtol=1e-14)


def asked(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss(embedding, ids, True), embedding.weight)
    assert embedding.weight.grad is None
    return found


def of_a_gradient(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(loss(embedding, ids, True), embedding.weight, create_graph=True)
    (first**2).sum().backward()
    return gradient(embedding)


def for_it_alone(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    loss(embedding, ids, True).backward(inputs=[embedding.weight])
    return gradient(embedding)


def for_others(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    scale = torch.ones(H, dtype=torch.float64, requires_grad=True)
    (embedding(ids) * scale).sum().backward(inputs=[scale])
    assert embedding.weight.grad is None and scale.grad is not None
    return scale.grad


def with_a_hook(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    seen = []
    embedding.weight.register_hook(lambda grad: seen.append(grad.clone()))
    loss(embedding, ids, False).backward()
    return seen[0]


def with_a_later_hook(embedding: nn.Embedding, ids: Tensor) -> Tensor:
    seen = []
    embedding.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    loss(embedding, ids, True).backward()
    return seen[0]


@pytest.mark.parametrize(
    "take", [asked, of_a_gradient, for_it_alone, for_others, with_a_hook, with_a_later_hook], ids=lambda f: f.__name__
)
def test_whoever_takes_a_gradient_gets_all_of_it(take: Callable[[nn.Embedding, Tensor], Tensor]) -> None:
    ids = torch.tensor([[1, 2, 1], [3, 1, 0]])
    plain, rows = (take(embedding, ids) for embedding in pair())
    torch.testing.assert_close(rows, plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}])
def test_what_else_an_embedding_does_is_done(options: dict[str, Any]) -> None:
    ids = torch.tensor([[1, 2, 1], [3, 1, 0]])
    plain, rows = pair(**options)
    for embedding in (plain, rows):
        loss(embedding, ids, False).backward()
    assert torch.equal(gradient(rows), gradient(plain)) and torch.equal(rows.weight, plain.weight)


def test_small_weights_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST", V * H + 1)
    _, rows = pair()
    found = rows(torch.tensor([1]))
    assert type(found.grad_fn).__name__ == "EmbeddingBackward0"
    monkeypatch.setattr(module, "LEAST", V * H)
    assert type(rows(torch.tensor([1])).grad_fn).__name__ == "_LookupBackward"


class Large(TorchDispatchMode):
    """Note the operations that return a tensor of a shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.seen = shape, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.shape == self.shape:
            self.seen.append(func.overloadpacket.__name__)
        return made


def test_a_step_makes_one_tensor_of_the_size_of_the_weight(tmp_path: Path) -> None:
    """The gradient of the head, to which that of the embedding is added."""
    trainer = make("SFTTrainer", tmp_path)
    words = trainer.model.lm.get_input_embeddings()
    assert type(words) is _RowEmbedding and words.weight is trainer.model.lm.get_output_embeddings().weight
    with Large(words.weight.shape) as large:
        trainer.learn()
    steps = trainer.progress.step
    assert steps and large.seen.count("mm") == large.seen.count("index_add_") == steps
    assert large.seen.count("zeros_like") == 2, "Adam's moments alone"
    assert not {"embedding_dense_backward", "add", "add_", "fill_", "clone", "copy_"} & set(large.seen)
