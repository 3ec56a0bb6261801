"""The cache of rows that leave and come: what a row sees is what was written for it, wherever it is kept."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, strategies as st
from transformers.cache_utils import DynamicCache

from trlx_like.samplers import cache as module
from trlx_like.samplers.cache import RowCache


@patch.multiple(module, LEAST_KEYS_SAVED=1, LEAST_ROWS=1, MOST_PLACES=9)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5), wider=st.integers(0, 2))
def test_every_row_keeps_what_was_written_for_it(seed: int, rows: int, wider: int) -> None:
    """Prompts no longer than those before come and rows leave; a list a row holds what its cache should hold."""
    draw, shortest = random.Random(seed), 6
    cache, expected = (
        RowCache(rows, shortest + 5),
        list[list[int]](),
    )  # the token of each column of a row, without padding
    value, written = 10, list[int]()  # how many tokens of each row are behind its prompt
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
            written += [0 for _ in index]
        else:
            done = [len(row) > 8 or draw.random() < 0.3 for row in expected]
            if any(done):
                order = cache.drop(done)
                expected, written = [expected[at] for at in order], [written[at] for at in order]
            if not expected:
                continue
            new = torch.tensor([[value := value + 1] for _ in expected])
            mask, tokens = cache.extend(new), cache.ids
            states = new[:, None, :, None].float()
            keys, values = cache.update(states.expand(-1, 2, -1, 3), (-states).expand(-1, 2, -1, 3 + wider), 0)
            for row, number in zip(expected, new[:, 0].tolist(), strict=True):
                row.append(number)
            written = [count + 1 for count in written]
            for at, row in enumerate(expected):
                seen = torch.ones(tokens.shape[1], dtype=torch.bool) if mask is None else mask[at].bool()
                assert tokens[at][seen].tolist() == row
                assert keys[at, 1, seen, 2].tolist() == row
                assert values[at, 0, seen, -1].tolist() == [-number for number in row]
            assert tokens.shape[1] == max(map(len, expected)), "columns that no row needs are not shown"
            assert cache.get_seq_length() == tokens.shape[1]
            check_common(cache, keys, max(written))


def check_common(cache: RowCache, keys: torch.Tensor, longest: int) -> None:
    """Rows of a prompt have the keys of one of them in the columns before the longest response."""
    common, rows = cache.common, len(keys)
    prompts = list(dict.fromkeys(cache.prompts))
    width = keys.shape[2] - longest
    assert (common is None) == (width * (rows - len(prompts)) == 0)
    if common is None:
        return
    places = range(rows) if common.places is None else common.places.tolist()
    firsts = torch.arange(rows)[common.firsts].tolist()
    assert common.width == width and len(set(places)) == rows
    assert common.rows_per_prompt == max(map(cache.prompts.count, prompts))
    assert [cache.prompts[first] for first in firsts] == prompts
    for row, place in enumerate(places):
        first = firsts[place // common.rows_per_prompt]
        assert cache.prompts[first] == cache.prompts[row]
        assert torch.equal(keys[first, :, :width], keys[row, :, :width])


def test_its_memory_is_allocated_once() -> None:
    cache, places = RowCache(3, 9), set()
    read = DynamicCache()
    read.update(torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2), 0)
    cache.admit(read, torch.ones(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.bool), torch.tensor([0, 0, 0]))
    for step in range(5):
        rows = len(cache.begins)
        cache.extend(torch.ones(rows, 1, dtype=torch.int64))
        keys, _ = cache.update(torch.ones(rows, 1, 1, 2), torch.ones(rows, 1, 1, 2), 0)
        places.add((keys.untyped_storage().data_ptr(), keys.untyped_storage().nbytes()))
        if step == 2:
            cache.drop([True, False, False])
    assert len(places) == 1 and next(iter(places))[1] == 3 * 9 * 2 * 4


@pytest.mark.parametrize(
    ("width", "index", "shares"),
    [
        (429, [0] * 8, True),  # 7 rows need not read 429 keys each: 3,003
        (428, [0] * 8, False),
        (1000, [0, 0, 0, 0, 1, 1, 1, 1], True),
        (1000, [0, 0, 0, 0, 1, 1, 1], False),  # fewer than 4 rows to a prompt
        (1000, [0] * 7 + [1], True),
        (1000, [0] * 10 + [1, 2], False),  # 30 places for 12 rows
    ],
)
def test_rows_share_what_is_worth_it(width: int, index: list[int], shares: bool) -> None:
    cache, read = RowCache(len(index), width + 1), DynamicCache()
    ids = torch.arange(3 * width).view(3, width)[: 1 + max(index)]
    read.update(ids[:, None, :, None].float(), ids[:, None, :, None].float(), 0)
    cache.admit(read, ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor(index))
    assert (cache.common is not None) == shares
