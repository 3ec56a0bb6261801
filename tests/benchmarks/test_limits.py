"""The figures that limits are taken from."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks import limits
from benchmarks.peers.laps import KERNELS, by_kind


def test_operations_and_bytes_by_hand() -> None:
    """Of 2 rows of 16 + 48 tokens through one block of width 64, and a vocabulary of 500 that is tied to the words."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=500, n_positions=64)).eval()
    with torch.random.fork_rng():
        found = {name: rest for name, *rest in [*limits.sampling(model, 2, 1), *limits.learning(model, 2, 1)]}
    weights = 500 * 64 + 64 * 64 + (64 + 1) * (192 + 64 + 256) + (256 + 1) * 64 + 3 * 2 * 64
    products = 64 * (192 + 64 + 2 * 256)  # of a token in the block
    whole = 2 * 2 * (64 * products + 48 * 64 * 500)
    assert found["forward"][1] == pytest.approx(whole, rel=0.03)  # rounded to millions
    assert found["optimizer step"][1:] == [0.0, 4 * 7 * weights]
    # A row has the 16 tokens of the prompt and, in the middle, 8 more: keys and values of 64 numbers of 4 bytes.
    assert found["decode, a step"][2] == 4 * weights + 2 * 2 * 4 * 64 * (16 + 8)


def test_an_operation_counts_once() -> None:
    """`addmm` and `addcmul` begin like `add`, and count as what they are."""
    taken = {"aten::addmm": 1.0, "aten::addcmul": 2.0, "aten::add_": 4.0, "aten::mm": 8.0, "aten::view": 16.0}
    kinds = {"products": 9.0, "activations": 2.0, "copies and sums": 4.0}
    assert by_kind(taken) == {**dict.fromkeys(KERNELS, 0.0), **kinds}
