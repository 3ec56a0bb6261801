"""The store: every element once a pass, in an order that a seed decides, and the same after a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.unit.data.test_experience import Trace, elements, same, trace
from trlx_like.checkpoint import load_tree, save_tree
from trlx_like.data import Completion, RolloutStore, store as store_module
from trlx_like.data.flat import View
from trlx_like.data.store import similar_lengths
from trlx_like.errors import CheckpointError


def numbered(count: int) -> RolloutStore[Trace]:
    """Elements of different lengths that know their number."""
    store = RolloutStore(Trace)
    store.push(trace(1 + n % 3, 1 + n % 4, float(n)) for n in range(count))
    return store


def whole(store: RolloutStore[Trace], size: int, seed: int, epochs: int = 1) -> list[Trace]:
    """The batches of one process, which has a part of each."""
    batches = list(store.batches(size, torch.Generator().manual_seed(seed), epochs))
    assert all(batch is not None for batch in batches)
    return [batch for batch in batches if batch is not None]


def drawn(store: RolloutStore[Trace], size: int, seed: int, epochs: int = 1) -> list[list[int]]:
    """The numbers of the elements in each batch."""
    batches = whole(store, size, seed, epochs)
    return [[int(score) for score in batch.score] for batch in batches]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 3), st.integers(0, 99))
def test_every_element_once_a_pass(count: int, size: int, epochs: int, seed: int) -> None:
    batches = drawn(numbered(count), size, seed, epochs)
    a_pass = -(-count // size)
    assert len(batches) == a_pass * epochs
    for epoch in range(epochs):
        part = batches[epoch * a_pass : (epoch + 1) * a_pass]
        assert [len(batch) for batch in part[:-1]] == [size] * (a_pass - 1)
        assert Counter(n for batch in part for n in batch) == Counter(range(count))


def test_the_order_is_that_of_the_seed_and_another_one_each_pass() -> None:
    store = numbered(20)
    first = drawn(store, 5, 1, epochs=2)
    assert first == drawn(store, 5, 1, epochs=2)
    assert first != drawn(store, 5, 2, epochs=2)
    assert first[:4] != first[4:]
    assert [n for batch in first[:4] for n in batch] != list(range(20))


def test_batches_hold_the_elements_and_are_as_wide_as_their_longest() -> None:
    store = numbered(7)
    for batch in whole(store, 2, 0):
        rows = [store.elements[int(score)] for score in batch.score]
        assert batch.mask.shape[1] == max(len(row.mask) for row in rows)
        assert batch.prompt.shape[1] == max(len(row.prompt) for row in rows)
        assert all(same(got, put) for got, put in zip(batch.split(), rows, strict=True))


def test_batches_do_not_lend_the_elements() -> None:
    store = RolloutStore(Trace)
    store.push([trace(1, 2)])
    for batch in whole(store, 1, 0):
        batch.logprobs.fill_(7)
    assert same(store.elements[0], trace(1, 2))


def test_a_store_begins_before_its_first_pass_and_makes_one() -> None:
    store = numbered(3)
    assert (store.epoch, store.rows) == (0, [])
    assert len(list(store.batches(2, torch.Generator()))) == 2
    assert (store.epoch, store.rows) == (0, [])


def test_push_and_clear() -> None:
    store = numbered(2)
    store.push([trace(1, 1)])
    assert len(store) == 3
    store.clear()
    assert len(store) == 0 and list(store.batches(2, torch.Generator())) == []


def saved_and_loaded(store: RolloutStore[Trace], path: Path) -> RolloutStore[Trace]:
    save_tree(store.state_dict(), path)
    other = RolloutStore(Trace)
    other.push([trace(1, 1, 99.0)])  # loading replaces what is there
    other.load_state_dict(load_tree(path))
    return other


@settings(max_examples=25, deadline=None, derandomize=True)
@given(elements())
def test_a_checkpoint_brings_the_elements_back_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Trace]
) -> None:
    store = RolloutStore(Trace)
    store.push(rows)
    other = saved_and_loaded(store, tmp_path_factory.mktemp("store") / "store")
    assert all(same(got, put) for got, put in zip(other.elements, rows, strict=True))
    orders = [list(s.batches(2, torch.Generator().manual_seed(3))) for s in (store, other)]
    assert all(same(a, b) for a, b in zip(*orders, strict=True))


def test_batches_that_are_skipped_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    whole_run = [(list(store.rows), store.epoch) for store in [numbered(7)] for _ in store.batches(3, seeded(), 3)]
    made: list[int] = []
    collate = Trace.collate

    def counted(rows: Sequence[Trace]) -> Trace:
        made.append(len(rows))
        return collate(rows)

    monkeypatch.setattr(Trace, "collate", counted)
    store = numbered(7)
    rest = [(list(store.rows), store.epoch) for _ in store.batches(3, seeded(), 3, skip=4)]
    assert rest == whole_run[4:] and len(made) == 5


# Similar lengths.


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_similar_lengths_golden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of four: [3, 0, 1, 4] has the lengths 1, 5, 2, 9, and [2, 6, 5, 7] has 4, 3, 3, 8; 8 is left over."""
    monkeypatch.setattr(store_module, "WINDOW", 2)
    sizes = torch.tensor([5, 2, 4, 1, 9, 3, 3, 8, 7])
    order = torch.tensor([3, 0, 1, 4, 2, 6, 5, 7, 8])
    found = similar_lengths(order, sizes, 2, seeded()).tolist()
    assert sorted([found[:2], found[2:4]]) == [[0, 4], [3, 1]]
    assert sorted([found[4:6], found[6:8]]) == [[2, 7], [6, 5]]
    assert found[8:] == [8]


def test_batches_are_sorted_in_windows_of_a_hundred() -> None:
    found = similar_lengths(torch.arange(101), torch.arange(101), 1, seeded()).tolist()
    assert found[100] == 100 and sorted(found) == list(range(101)) != found


def padded_tokens(store: RolloutStore[Trace], **options: bool) -> float:
    """Tokens that batches of 8 hold with their padding, for each real one."""
    batches = [batch for batch in store.batches(8, seeded(), **options) if batch is not None]
    held = sum(batch.mask.numel() + batch.prompt_mask.numel() for batch in batches)
    return held / sum(int(batch.mask.sum() + batch.prompt_mask.sum()) for batch in batches)


def test_similar_lengths_save_padding() -> None:
    """With lengths as mixed as those of published data, log-normal with a coefficient of variation of 1."""
    lengths = torch.exp(torch.randn(2000, generator=seeded()) * 0.83 + 4).long() + 1
    store = RolloutStore(Trace)
    store.push(trace(1, int(length)) for length in lengths)
    assert padded_tokens(store, by_length=True) < 1.15 < 1.9 < padded_tokens(store)


def test_a_length_is_in_tokens_whatever_is_kept_beside_them() -> None:
    store, one = RolloutStore(Completion), torch.tensor([7])
    sizes = torch.tensor([2, 1], dtype=torch.int32)  # words of `choices` for each token
    store.push([Completion(one, one > 0, sizes.long(), sizes > 0, choices=torch.arange(3), choice_sizes=sizes)])
    assert store.sizes().tolist() == [3]


@pytest.mark.parametrize("ranks", [2, 3])
def test_similar_lengths_are_the_same_on_any_number_of_processes(ranks: int) -> None:
    def rows(rank: int) -> tuple[list[list[int]], list[list[int]]]:
        store = numbered(40)
        of_all, own = [], []
        for batch in store.batches(6, seeded(), 2, rank=rank, ranks=ranks, by_length=True):
            of_all.append(list(store.rows))
            own.append([] if batch is None else [int(score) for score in batch.score])
        return of_all, own

    found = [rows(rank) for rank in range(ranks)]
    assert all(of_all == found[0][0] for of_all, _ in found)
    for number, batch in enumerate(found[0][0]):
        assert [own[number] for _, own in found] == [batch[rank::ranks] for rank in range(ranks)]
    for epoch in (found[0][0][:7], found[0][0][7:]):
        assert sorted(row for batch in epoch for row in batch) == list(range(40)) and len(epoch[-1]) == 4
    assert found[0][0][:7] != found[0][0][7:]


# Rows that are made when they are read.


def test_whole_rows_that_are_made_when_they_are_read_stay_so() -> None:
    made = []

    def element(number: int) -> Trace:
        made.append(number)
        return trace(1 + number % 3, 1 + number % 4, float(number))

    store = RolloutStore(Trace)
    store.push(View(range(7), element), whole=True)
    store.join(lambda items: items, 2)
    assert made == [] and len(store) == 7
    assert drawn(store, 2, 5) == drawn(numbered(7), 2, 5) and sorted(made) == list(range(7))
    store.push([trace(1, 1, 7.0)])
    assert len(store) == 8 and [int(element.score) for element in store.elements] == list(range(8))


# Elements of several processes.


def join(*stores: RolloutStore[Trace]) -> None:
    """Join stores as the processes of a run do, each in a thread."""
    met, given = Barrier(len(stores), timeout=20), [list[Any]() for _ in stores]

    def join_one(rank: int) -> None:
        def gather(items: list[Any]) -> list[Any]:
            given[rank] = items
            met.wait()
            return [item for share in given for item in share]

        stores[rank].join(gather, len(stores))

    with ThreadPoolExecutor(len(stores)) as threads:
        list(threads.map(join_one, range(len(stores))))


def scores(store: RolloutStore[Trace]) -> list[int]:
    return [int(element.score) for element in store.elements]


def test_shares_are_joined_in_the_order_that_they_were_dealt_out() -> None:
    stores = [RolloutStore(Trace) for _ in range(3)]
    for rank, store in enumerate(stores):
        store.push(trace(1, 1 + n % 3, float(n)) for n in range(rank, 100, 3))
    join(*stores)
    assert [scores(store) for store in stores] == [list(range(100))] * 3
    for rank, store in enumerate(stores):  # more of the same round; the second process has none
        store.push([trace(1, 1, 100.0 + rank)] * (rank != 1))
    join(*stores)
    assert [scores(store) for store in stores] == [[*range(100), 100, 102]] * 3
    join(*stores)  # nothing new on any of them
    assert [len(store) for store in stores] == [102] * 3
    for store in stores:
        store.clear()
        store.push([trace(1, 1, 7.0)])
    join(*stores)
    assert [scores(store) for store in stores] == [[7, 7, 7]] * 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_elements_with_a_place_are_joined_by_it(ranks: int) -> None:
    order = torch.randperm(60, generator=seeded()).tolist()
    stores = [RolloutStore(Trace) for _ in range(ranks)]
    for rank, store in enumerate(stores):
        store.push(replace(trace(1, 1, float(n)), place=torch.tensor(n // 2)) for n in order[rank::ranks])
    join(*stores)
    dealt = [n for rank in range(ranks) for n in order[rank::ranks]]  # those of one place keep this order
    assert [scores(store) for store in stores] == [sorted(dealt, key=lambda n: n // 2)] * ranks


def test_one_process_keeps_the_order_of_elements_that_have_no_place() -> None:
    store = RolloutStore(Trace)
    store.push([replace(trace(1, 1, 0.0), place=torch.tensor(5)), trace(1, 1, 1.0)])
    store.join(lambda items: [], 1)  # asks nobody
    assert scores(store) == [0, 1]
    store.push([replace(trace(1, 1, float(n)), place=torch.tensor(n)) for n in (3, 2)])
    store.join(lambda items: [], 1)
    assert scores(store) == [0, 1, 2, 3]


def test_rows_that_are_made_when_they_are_read_are_made_if_others_have_more() -> None:
    def element(number: int) -> Trace:
        return trace(1, 1, float(number))

    alone = RolloutStore(Trace)
    alone.push(View(range(4), element))
    alone.join(lambda items: [], 1)
    assert isinstance(alone.elements, View) and alone.joined == 4
    stores = [RolloutStore(Trace) for _ in range(2)]
    for rank, store in enumerate(stores):
        store.push(View(range(rank, 8, 2), element))
    join(*stores)
    assert [scores(store) for store in stores] == [list(range(8))] * 2


def test_an_empty_store(tmp_path: Path) -> None:
    assert len(saved_and_loaded(RolloutStore(Trace), tmp_path / "store")) == 0


def test_loaded_elements_own_their_memory(tmp_path: Path) -> None:
    other = saved_and_loaded(numbered(3), tmp_path / "store")
    other.elements[0].logprobs.fill_(7)
    assert same(other.elements[1], trace(2, 2, 1.0))
    assert other.elements[1].logprobs.untyped_storage().nbytes() == 8


def test_a_field_that_is_missing_is_refused_unless_it_may_be_none() -> None:
    saved = numbered(2).state_dict()
    saved["columns"].pop("goal", None)
    store = numbered(1)
    store.load_state_dict(saved)
    assert [element.goal for element in store.elements] == [None, None]
    del saved["columns"]["logprobs"]
    with pytest.raises(CheckpointError, match="store lacks logprobs, which every Trace has"):
        store.load_state_dict(saved)
    assert len(store) == 2


def test_fields_of_another_experience_are_refused() -> None:
    saved = numbered(2).state_dict()
    saved["columns"]["returns"] = saved["columns"]["score"]
    store = numbered(1)
    with pytest.raises(CheckpointError, match="has returns, which Trace does not have; its fields are .*score"):
        store.load_state_dict(saved)
    assert len(store) == 1
