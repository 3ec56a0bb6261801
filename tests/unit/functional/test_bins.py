"""Best fit and even rows, by hand."""

from __future__ import annotations

from trlx_like.functional.bins import balanced, best_fit


def test_an_item_goes_where_it_leaves_least() -> None:
    """Rows of 10: 6 and 5 open two rows, 4 fills the first, 3 the second, and 2 finds exactly its place there."""
    assert list(best_fit([6, 5, 4, 3, 2], 10)) == [0, 1, 0, 1, 1]


def test_the_tightest_row_is_taken_even_if_it_is_later() -> None:
    """After 5 and 7 the rows have 5 and 3 left: 3 goes into the second, and the next 3 into the first."""
    assert list(best_fit([5, 7, 3, 3], 10)) == [0, 1, 1, 0]


def test_of_equal_rows_the_first_is_taken() -> None:
    assert list(best_fit([8, 8, 8, 2, 2], 10)) == [0, 1, 2, 0, 1]


def test_nothing_needs_no_row() -> None:
    assert list(best_fit([], 10)) == []


def test_an_item_goes_into_the_shortest_row() -> None:
    """Rows of 6 and 5, then 5 + 4 and 6 + 3, and the first of the equal ones gets 2."""
    assert list(balanced([6, 5, 4, 3, 2], 2)) == [0, 1, 1, 0, 0]
    assert list(balanced([1, 1], 3)) == [0, 1] and list(balanced([], 2)) == []
