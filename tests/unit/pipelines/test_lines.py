"""A large file of JSON lines is read as rows, takes the memory of its text, and is checked when it is first used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_tokenizer
from trlx_like.config import DataConfig
from trlx_like.errors import DataError
from trlx_like.pipelines import lines, prepared, sources
from trlx_like.pipelines.given import read_arguments, shaped
from trlx_like.pipelines.lines import JsonLines
from trlx_like.pipelines.preferences import encode_preferences
from trlx_like.pipelines.sources import load_rows

PAIRS = [{"prompt": "ab", "chosen": "c", "rejected": "d"}, {"prompt": "b\u2028é", "chosen": "c", "rejected": "d"}]


def written(folder: Path, content: str | bytes) -> str:
    path = folder / "rows.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def lines_of(*rows: Any) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def read(spec: Any, **options: Any) -> Any:
    data = DataConfig(preferences=spec, **options)
    return shaped(read_arguments({}, data, ["preferences"]), data, {"preferences", "eval_preferences"})["preferences"]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two rows are many, and prepared data are kept here."""
    monkeypatch.setattr(sources, "FEWEST", 2)
    monkeypatch.setattr(prepared, "FEWEST", 2)
    monkeypatch.setenv(prepared.VARIABLE, str(tmp_path / "cache"))


@pytest.mark.parametrize("part", [3, lines.PART])
def test_rows_are_those_of_the_lines(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "PART", part)
    content = "\ufeff\n" + lines_of(PAIRS[0]) + " \t\r\n\u3000\n" + lines_of(PAIRS[1]).replace("\n", "\r\n") + "[1]"
    file = written(tmp_path, content)
    rows = JsonLines(Path(file))
    assert list(rows) == rows[:] == load_rows(file, "data.rows") == [*PAIRS, [1]]
    assert (len(rows), rows[-1], rows[1:], rows.line(0), rows.line(1)) == (3, [1], [PAIRS[1], [1]], 2, 5)


def test_they_are_encoded_as_a_list_is_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, lines_of(*PAIRS))
    encoded = [encode_preferences(rows, tiny_tokenizer(), max_length=20) for rows in (read(file), PAIRS)]
    assert isinstance(read(file), JsonLines) and list(encoded[0]) == list(encoded[1])
    again = read(file)
    monkeypatch.setattr(JsonLines, "__getitem__", None)  # from here on no row is read
    assert list(encode_preferences(again, tiny_tokenizer(), max_length=20)) == list(encoded[1])


def test_other_sources_are_lists(tmp_path: Path) -> None:
    file = written(tmp_path, lines_of(*PAIRS))
    for spec, options in (
        ({"path": file, "take": 2}, {}),
        ({"mix": [{"path": file}]}, {}),
        (file, {"columns": {"prompt": "prompt"}}),
        (file, {"eval_split": 0.5}),
    ):
        assert isinstance(read(spec, **options), list)
    cells = written(tmp_path, lines_of({"chosen": "a"}, {"chosen": "b"}))  # of the only column
    assert sources.load_lines(cells, "data.samples") is None and load_rows(cells, "data.samples") == ["a", "b"]
    prompts = written(tmp_path, lines_of({"prompt": "a"}, {"prompt": "b"}))
    assert sources.load_lines(prompts, "data.samples") is None
    assert isinstance(sources.load_lines(prompts, "data.prompts"), JsonLines)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (b'{"prompt": 1}', r"data.preferences: .*rows.jsonl:3 must be an object with chosen and rejected"),
        (b"{", r"data.preferences: .*rows.jsonl:3 is not JSON"),
        (b'{"chosen": "\xff"}', r"data.preferences: .*rows.jsonl is not UTF-8 text \(byte 62\)"),
        (b'{"chosen": "\\ud800", "rejected": ""}', r"data.preferences: .*rows.jsonl:3: "),
    ],
)
def test_a_wrong_row_is_named_by_its_line(second: bytes, message: str, tmp_path: Path) -> None:
    rows = read(written(tmp_path, lines_of(PAIRS[0]).encode() + b"\n" + second + b"\n"))
    with pytest.raises(DataError, match=message):
        encode_preferences(rows, tiny_tokenizer(), max_length=20)
    with pytest.raises(DataError, match=message):
        load_rows(str(tmp_path / "rows.jsonl"), "data.preferences")


def test_labelled_lines_make_pairs(tmp_path: Path) -> None:
    labelled = [{"prompt": "a", "completion": text, "label": text == "b"} for text in "bc"]
    assert read(written(tmp_path, lines_of(*labelled))) == [{"prompt": "a", "chosen": "b", "rejected": "c"}]
