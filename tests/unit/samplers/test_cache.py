"""The cache of rows that leave and come: what a row sees is what was written for it, wherever it is kept."""

from __future__ import annotations

import random

import torch
from hypothesis import given, strategies as st
from transformers.cache_utils import DynamicCache

from trlx_like.samplers.cache import RowCache


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5), wider=st.integers(0, 2))
def test_every_row_keeps_what_was_written_for_it(seed: int, rows: int, wider: int) -> None:
    """Prompts no longer than those before come and rows leave; a list a row holds what its cache should hold."""
    draw, shortest = random.Random(seed), 6
    cache, expected = (
        RowCache(rows, shortest + 5),
        list[list[int]](),
    )  # the token of each column of a row, without padding
    value = 10
    for _ in range(12):
        if len(expected) < rows and draw.random() < 0.5 or not expected:
            unique = draw.randint(1, 3)
            shortest = draw.randint(1, shortest)
            lengths = [shortest, *(draw.randint(1, shortest) for _ in range(unique - 1))]
            prompts = [list(range(value := value + 10, value + length)) for length in lengths]
            ids = torch.tensor([[-1] * (shortest - len(row)) + row for row in prompts])
            index = [draw.randrange(unique) for _ in range(draw.randint(1, rows - len(expected)))]
            read = DynamicCache()
            states = ids[:, None, :, None].float()
            read.update(states.expand(-1, 2, -1, 3), (-states).expand(-1, 2, -1, 3 + wider), 0)
            cache.admit(read, ids, ids >= 0, torch.tensor(index))
            expected += [list(prompts[at]) for at in index]
        else:
            done = [len(row) > 8 or draw.random() < 0.3 for row in expected]
            if any(done):
                expected = [expected[at] for at in cache.drop(done)]
            if not expected:
                continue
            new = torch.tensor([value := value + 1 for _ in expected])
            tokens, mask = cache.inputs(new)
            states = new[:, None, None, None].float()
            keys, values = cache.update(states.expand(-1, 2, -1, 3), (-states).expand(-1, 2, -1, 3 + wider), 0)
            for row, number in zip(expected, new.tolist(), strict=True):
                row.append(number)
            for at, row in enumerate(expected):
                seen = torch.ones(tokens.shape[1], dtype=torch.bool) if mask is None else mask[at].bool()
                assert tokens[at][seen].tolist() == row
                assert keys[at, 1, seen, 2].tolist() == row
                assert values[at, 0, seen, -1].tolist() == [-number for number in row]
            assert tokens.shape[1] == max(map(len, expected)), "columns that no row needs are not shown"
            assert cache.get_seq_length() == tokens.shape[1]


def test_its_memory_is_allocated_once() -> None:
    cache, places = RowCache(3, 9), set()
    read = DynamicCache()
    read.update(torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2), 0)
    cache.admit(read, torch.ones(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.bool), torch.tensor([0, 0, 0]))
    for step in range(5):
        rows = len(cache.begins)
        cache.inputs(torch.ones(rows, dtype=torch.int64))
        keys, _ = cache.update(torch.ones(rows, 1, 1, 2), torch.ones(rows, 1, 1, 2), 0)
        places.add((keys.untyped_storage().data_ptr(), keys.untyped_storage().nbytes()))
        if step == 2:
            cache.drop([True, False, False])
    assert len(places) == 1 and next(iter(places))[1] == 3 * 9 * 2 * 4
