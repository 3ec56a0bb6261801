"""Large data is held as text, takes the memory of its text, and is checked when it is first used."""

from __future__ import annotations

import csv
import io
import json
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_tokenizer
from trlx_like.config import DataConfig
from trlx_like.errors import DataError
from trlx_like.pipelines import lines, prepared, sources, tables
from trlx_like.pipelines.files import READERS
from trlx_like.pipelines.given import read_arguments, shaped
from trlx_like.pipelines.lines import JsonLines, compact
from trlx_like.pipelines.preferences import encode_preferences
from trlx_like.pipelines.sources import check_source, load_rows

PAIRS = [{"prompt": "ab", "chosen": "c", "rejected": "d"}, {"prompt": "b\u2028é", "chosen": "c", "rejected": "d"}]
COLUMNS = {"prompt": "chosen", "chosen": "prompt"}
FEW = 10**9


def written(folder: Path, content: str | bytes, suffix: str = "jsonl") -> str:
    path = folder / f"rows.{suffix}"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def lines_of(*rows: Any) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def table_of(*rows: dict[str, str]) -> str:
    out = io.StringIO(newline="")
    table = csv.DictWriter(out, rows[0].keys())
    table.writeheader()
    table.writerows(rows)
    return out.getvalue()


def parquet_of(*rows: dict[str, str]) -> bytes:
    parquet, out = pytest.importorskip("pyarrow.parquet"), io.BytesIO()
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(list(rows)), out)
    return out.getvalue()


WRITE: dict[str, Callable[..., str | bytes]] = {
    "jsonl": lines_of,
    "json": lambda *rows: json.dumps(rows),
    "csv": table_of,
    "parquet": parquet_of,
}


def read(spec: Any, **options: Any) -> Any:
    data = DataConfig(preferences=spec, **options)
    return shaped(read_arguments({}, data, ["preferences"]), data, {"preferences", "eval_preferences"})["preferences"]


def many(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Say how many rows are many."""
    for module in (lines, sources, prepared):
        monkeypatch.setattr(module, "FEWEST", count)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two rows are many, and prepared data are kept here."""
    many(2, monkeypatch)
    monkeypatch.setenv(prepared.VARIABLE, str(tmp_path / "cache"))


@pytest.mark.parametrize("part", [3, lines.PART])
def test_rows_are_those_of_the_lines(part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "PART", part)
    content = "\ufeff\n" + lines_of(PAIRS[0]) + " \t\r\n\u3000\n" + lines_of(PAIRS[1]).replace("\n", "\r\n") + "[1]"
    file = written(tmp_path, content)
    rows = JsonLines.read(Path(file))
    assert list(rows) == rows[:] == load_rows(file, "data.rows") == [*PAIRS, [1]]
    assert (len(rows), rows[-1], rows[1:]) == (3, [1], [PAIRS[1], [1]])
    assert list(rows.taken([2, 0])) == [[1], PAIRS[0]]


@pytest.mark.parametrize(
    ("form", "options"),
    [
        *((form, {}) for form in WRITE),
        *((form, {"columns": COLUMNS}) for form in ("jsonl", "csv")),
        *((form, {"eval_split": 0.2}) for form in ("jsonl", "csv")),
        ("jsonl", {"take": 4}),
        ("csv", {"take": 4}),
        ("jsonl", {"mix": "csv"}),
        ("jsonl", {"mix": "csv", "columns": COLUMNS}),
    ],
)
def test_all_forms_are_text_with_the_rows_and_the_encoding_of_a_list(
    form: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "ab"[n % 2], "chosen": f"c{n}", "rejected": 'd"\n'} for n in range(6)]
    spec: Any = written(tmp_path, WRITE[form](*rows), form)
    options = dict(options)
    if "take" in options:
        spec = {"path": spec, "take": options.pop("take")}
    if "mix" in options:
        other = options.pop("mix")
        spec = {"mix": [{"path": spec}, {"path": written(tmp_path, WRITE[other](*rows[:4]), other), "weight": 2}]}
    found = read(spec, **options)
    assert isinstance(found, JsonLines)

    def encoded(rows: Sequence[Any]) -> list[Any]:
        return list(encode_preferences(rows, tiny_tokenizer(), max_length=20))

    first, again = encoded(found), encoded(read(spec, **options))
    many(FEW, monkeypatch)
    monkeypatch.setenv(prepared.VARIABLE, "")
    plain = read(spec, **options)
    assert isinstance(plain, list) and list(found) == plain and first == again == encoded(plain)


def test_the_second_start_reads_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def encoded(rows: Any) -> list[Any]:
        return list(encode_preferences(rows, tiny_tokenizer(), max_length=20))

    file = written(tmp_path, lines_of(*PAIRS))
    first, again = encoded(read(file)), read(file)
    other = read(file, columns={"prompt": "prompt", "chosen": "rejected", "rejected": "chosen"})
    assert encoded(other) != first  # other rows, though of the same text
    monkeypatch.setattr(JsonLines, "__getitem__", None)  # from here on no row is read
    assert encoded(again) == first


@pytest.mark.parametrize("form", ["csv", "parquet", "json"])
def test_the_second_start_reads_no_table(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, opened = [{"prompt": "ab"[n % 2], "chosen": f"é{n}", "rejected": 'd"\n'} for n in range(6)], []
    reader = READERS[f".{form}"]

    def watched(path: Path, option: str) -> Any:
        opened.append(path)
        return reader(path, option)

    monkeypatch.setitem(READERS, f".{form}", watched)
    file = written(tmp_path, WRITE[form](*rows), form)
    for times, spec, wanted in (
        (1, file, rows),
        (1, file, rows),
        (2, {"path": file, "take": 4}, rows[:4]),
        (2, {"path": file, "take": 4}, rows[:4]),
    ):
        found = read(spec)
        assert isinstance(found, JsonLines) and found[:] == wanted and len(opened) == times
    (Path(file)).write_bytes(b"a" * Path(file).stat().st_size if form == "csv" else b"[]")
    with pytest.raises(DataError):
        read(file)
    written(tmp_path, WRITE[form](*rows[::-1]), form)
    assert read(file)[:] == rows[::-1]
    for kept in (tmp_path / "cache").iterdir():
        kept.write_bytes(kept.read_bytes()[:-1])  # damaged
    assert read(file)[:] == rows[::-1]


def test_the_second_start_draws_no_row_of_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    draw = tables._drawn

    def watched(*parts: Any) -> Any:
        for row in draw(*parts):
            drawn.append(row)
            yield row

    monkeypatch.setattr(tables, "_drawn", watched)
    rows = [{"prompt": "a", "chosen": f"c{n}", "rejected": "d"} for n in range(4)]
    file, few = written(tmp_path, lines_of(*rows)), [{"prompt": "b", "chosen": "c", "rejected": "d"}]

    def mixture(weight: float = 3.0, other: Any = few, name: str = "preferences", **options: Any) -> list[Any]:
        drawn.clear()
        spec = {"mix": [{"path": file, "weight": weight, **options}, {"path": str(more)}]}
        more.write_text(json.dumps(other), encoding="utf-8")
        return list(load_rows(spec, f"data.{name}"))

    more = tmp_path / "more.json"
    first = mixture()
    assert len(first) == len(drawn) == 4
    assert mixture() == first and drawn == []
    assert len(mixture(weight=2.0)) == len(drawn) == 3
    assert mixture(other=[{**few[0], "prompt": "c"}])[-1]["prompt"] == "c"
    assert mixture(columns=COLUMNS | {"rejected": "rejected"})[0]["prompt"].startswith("c") and drawn
    assert mixture(name="prompts") and drawn  # rows are checked as what they are read for


def test_data_sets_in_python_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(PAIRS * 3)
    for data in (table, table.to_iterable_dataset(), table.select([3, 1, 2])):
        found = read_arguments({"preferences": data}, DataConfig(columns=COLUMNS), ["preferences"])["preferences"]
        many(FEW, monkeypatch)
        plain = read_arguments({"preferences": data}, DataConfig(columns=COLUMNS), ["preferences"])["preferences"]
        many(2, monkeypatch)
        assert isinstance(found, JsonLines) and isinstance(plain, list) and list(found) == plain


@pytest.mark.parametrize("form", WRITE)
def test_rows_take_the_memory_of_their_text(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded rows take 350 bytes and more each. A .json file alone is decoded as a whole, for a moment."""
    count, rows = 4_000, ({"chosen": f"{n:08}", "rejected": f"{n:09}"} for n in range(4_000))
    monkeypatch.setattr(lines, "FEWEST", 100)
    file = written(tmp_path, WRITE[form](*rows), form)
    tracemalloc.start()
    try:
        found = read(file)
        held, peak = tracemalloc.get_traced_memory()
        assert isinstance(found, JsonLines) and len(found) == count
        assert held < 90 * count
        assert form == "json" or peak < 200 * count
        assert all(found)  # reads and checks every row
        assert tracemalloc.get_traced_memory()[1] < 200 * count or form == "json"
    finally:
        tracemalloc.stop()


def test_what_json_cannot_hold_stays_a_list() -> None:
    rows = [{"text": "a"}, {"text": "b", "of": {1, 2}}, {"text": "c"}]
    assert compact(iter(rows)) == rows and isinstance(compact(iter(rows)), list)
    assert compact(["\ud800", "a"]) == ["\ud800", "a"]
    assert isinstance(compact(rows[:1] * 2), JsonLines) and compact(rows[:1]) == rows[:1]


def test_the_cells_of_the_only_column(tmp_path: Path) -> None:
    cells = written(tmp_path, lines_of({"chosen": "a"}, {"chosen": "b"}))
    assert list(load_rows(cells, "data.samples")) == ["a", "b"]
    mixed = written(tmp_path, lines_of({"chosen": "a"}, {"chosen": "b", "k": 1}))
    assert list(load_rows(mixed, "data.samples")) == [{"chosen": "a"}, {"chosen": "b", "k": 1}]
    prompts = written(tmp_path, lines_of({"prompt": "a"}, {"prompt": "b"}))
    found = load_rows(prompts, "data.prompts")
    assert isinstance(found, JsonLines) and list(found) == list(load_rows(prompts, "data.samples")) == ["a", "b"]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (b'{"prompt": 1}', r"data.preferences: .*rows.jsonl:3 must be an object with chosen and rejected"),
        (b"{", r"data.preferences: .*rows.jsonl:3 is not JSON"),
        (b'{"chosen": "\xff"}', r"data.preferences .*rows.jsonl'\): is not UTF-8 text \(byte 62\)"),
        (b'{"chosen": "\\ud800", "rejected": ""}', r"data.preferences: .*rows.jsonl:3: "),
    ],
)
def test_a_wrong_row_is_named_by_its_line(second: bytes, message: str, tmp_path: Path) -> None:
    file = written(tmp_path, lines_of(PAIRS[0]).encode() + b"\n" + second + b"\n")
    for use in (
        lambda: encode_preferences(read(file), tiny_tokenizer(), max_length=20),
        lambda: encode_preferences(read({"mix": [{"path": file}]}), tiny_tokenizer(), max_length=20),
        lambda: check_source(file, "data.preferences"),
        lambda: list(read({"path": file, "take": 2})),
    ):
        with pytest.raises(DataError, match=message):
            use()


def test_a_wrong_row_is_named_by_its_line_if_others_are_held_out(tmp_path: Path) -> None:
    data = DataConfig(preferences=written(tmp_path, lines_of(*PAIRS * 2, {"prompt": 1})), eval_split=0.2)
    found = shaped(read_arguments({}, data, ["preferences"]), data, {"preferences", "eval_preferences"})
    with pytest.raises(DataError, match=r"rows.jsonl:5 must be an object with chosen and rejected"):
        for rows in found.values():
            list(rows)


def test_a_wrong_row_of_a_table_is_named_by_its_line(tmp_path: Path) -> None:
    file = written(tmp_path, 'chosen,rejected\n"a\nb",c\nc,\n', "csv")
    assert list(read(file)) == [{"chosen": "a\nb", "rejected": "c"}, {"chosen": "c", "rejected": ""}]
    with pytest.raises(DataError, match=r"rows.csv\[0\]: data.columns.prompt \('question'\) is no column"):
        check_source(file, "data.preferences", {"prompt": "question"})
    file = written(tmp_path, 'answer,label\n"a\nb",c\nc,d\n', "csv")
    with pytest.raises(DataError, match=r"rows.csv:3 must be an object with chosen and rejected"):
        check_source(file, "data.preferences")


def test_labelled_lines_make_pairs(tmp_path: Path) -> None:
    labelled = [{"prompt": "a", "completion": text, "label": text == "b"} for text in "bc"]
    assert read(written(tmp_path, lines_of(*labelled))) == [{"prompt": "a", "chosen": "b", "rejected": "c"}]
