"""Tables of other libraries as rows, sources with options, and mixtures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.pipelines.test_sources import message, written
from trlx_like.errors import ConfigError, DataError
from trlx_like.pipelines.sources import check_source, load_rows
from trlx_like.pipelines.tables import divided, held_out, listed, mixed, renamed

ROWS = [{"prompt": "a", "k": 1}, {"prompt": "b", "k": 2}]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_objects_of_other_libraries() -> None:
    datasets, pandas = pytest.importorskip("datasets"), pytest.importorskip("pandas")
    table = datasets.Dataset.from_list(ROWS)
    for data in (table, table.to_iterable_dataset(), pandas.DataFrame(ROWS), (row for row in ROWS), tuple(ROWS)):
        assert listed(data, "prompts") == ROWS
    frame = pandas.DataFrame({"prompt": ["a", None], "k": [1.0, float("nan")]})
    assert listed(frame, "prompts") == [{"prompt": "a", "k": 1.0}, {"prompt": None, "k": None}]
    assert listed(pandas.Series([1.0, 2.5]), "rewards") == [1.0, 2.5]
    calls = np.array([{"name": "search", "ids": np.array([1, 2])}], dtype=object)
    said = np.array([{"role": "assistant", "content": None, "tool_calls": calls}], dtype=object)
    cells: Any = {"messages": [said, pandas.NA], "at": [pandas.NaT, pandas.NA], "k": pandas.array([1, None], "Int64")}
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "search", "ids": [1, 2]}]}
    assert listed(pandas.DataFrame(cells, dtype=object), "samples") == [
        {"messages": [call], "at": None, "k": 1},
        {"messages": None, "at": None, "k": None},
    ]
    assert listed(pandas.Series([said]), "samples") == [[call]]
    twice = pandas.DataFrame([["a", "b"]], columns=["prompt", "prompt"])
    assert message(DataError, listed, twice, "prompts").startswith("prompts: a frame must name every column once")
    both = divided(datasets.DatasetDict(train=table, test=table.select([1])))
    assert [list(part) for part in both] == [ROWS, ROWS[1:]]
    assert listed(None, "prompts") is None and listed("text", "prompts") == "text"
    sets = {"train": ["a"], "test": ["b"]}
    assert divided(sets) == (sets, None)  # named evaluation sets


def test_columns_are_renamed() -> None:
    rows = [{"question": "q", "answer": "a", "id": 1}, "text"]
    columns = {"prompt": "question", "reference": "answer"}
    assert renamed(rows, columns, "prompts") == [{"prompt": "q", "reference": "a", "id": 1}, "text"]
    assert message(DataError, renamed, rows, {"prompt": "q"}, "prompts") == (
        "prompts[0]: data.columns.prompt ('q') is no column; there are question, answer, id."
    )
    file = written("a.csv", "question,answer\nq,a\n")
    assert load_rows(file, "data.prompts", columns) == [{"prompt": "q", "reference": "a"}]
    assert load_rows({"path": file, "columns": {"text": "answer"}}, "data.samples") == [{"text": "a", "question": "q"}]


def test_a_single_column_of_conversations_keeps_its_name() -> None:
    file = written("a.jsonl", '{"conversations": [{"from": "human", "value": "Hi"}]}\n')
    assert load_rows(file, "data.prompts") == [{"conversations": [{"from": "human", "value": "Hi"}]}]


def test_options_of_a_data_set(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", here / "cache")
    written("words/one/train.csv", "prompt,k\na,1\nb,2\n")
    written("words/two/train.csv", "prompt,k\nc,3\n")
    written(
        "words/README.md",
        "---\nconfigs:\n- config_name: one\n  data_files: one/*\n- config_name: two\n  data_files: two/*\n---\n",
    )
    for options, wanted in (
        ({"path": "words", "name": "one"}, ROWS),
        ({"path": "words:train[:1]", "name": "one"}, ROWS[:1]),
        ({"path": "words", "name": "one", "split": "train[1:]"}, ROWS[1:]),
        ({"path": "words", "name": "one", "streaming": True, "take": 1}, ROWS[:1]),
        ({"path": "csv", "data_files": "words/two/train.csv"}, [{"prompt": "c", "k": 3}]),
    ):
        assert load_rows(options, "data.prompts") == wanted
    given = message(ConfigError, load_rows, {"path": "words", "name": "three"}, "data.prompts")
    assert "cannot be loaded. BuilderConfig 'three' not found" in given


def test_mixtures() -> None:
    a, b = written("a.txt", "".join(f"a{n}\n" for n in range(10))), written("b.txt", "b0\nb1\nb2\n")
    rows = load_rows({"mix": [{"path": a, "weight": 2}, {"path": b}]}, "data.prompts")
    assert [row[0] for row in rows] == list("aaaaaabbb") and len(set(rows)) == 9
    assert mixed([["a"] * 4, ["b"] * 4], [3, 1], "") == ["a"] * 4 + ["b"]
    assert check_source({"mix": [{"path": a, "take": 2}, {"path": b}]}, "data.prompts")[0] == (
        "2 rows of a.txt, 3 rows of b.txt"
    )


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"name": "main"}, "data.prompts must have a path, and may have name, split"),
        ({"path": "a", "rows": 3}, "data.prompts must have a path, and may have name, split"),
        ({"path": "a", "take": 0}, "data.prompts.take (0) must be a number of rows, at least 1."),
        ({"path": "a", "columns": ["b"]}, "data.prompts.columns (['b']) must map names to the columns of the data."),
        ({"mix": [], "path": "a"}, "data.prompts.mix must be a list of sources, and have no keys beside it."),
        ({"mix": [{"path": "a", "weight": 0}]}, "data.prompts.mix[0].weight (0) must be a number above 0."),
    ],
)
def test_mistakes_in_a_source(spec: Any, sentence: str) -> None:
    for read in (load_rows, check_source):
        assert message(ConfigError, read, spec, "data.prompts").startswith(sentence)


def test_held_out_rows_are_the_same_at_each_call() -> None:
    rows = list(range(100))
    train, rest = held_out(rows, 0.05)
    assert len(rest) == 5 and sorted([*train, *rest]) == rows and train == sorted(train)
    assert held_out(rows, 0.05) == (train, rest)
    assert [len(part) for part in held_out([1, 2], 0.9)] == [1, 1]
