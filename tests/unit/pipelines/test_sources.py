"""Every way in which a YAML file can name data, and the sentence for each way to get it wrong."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trlx_like.errors import ConfigError, DataError, TrlxError
from trlx_like.imports import install_hint
from trlx_like.pipelines.sources import check_source, load_function, load_rows

FUNCTIONS = """\
import os

def rows():
    return ({"prompt": text, "level": 1} for text in "ab")

def texts():
    return ["a", "b"]

def one_column():
    return [{"prompt": "a"}]

def numbers():
    return [1, 2.5]

def nothing():
    return []

def word():
    return "abc"

def number():
    return 5

def fails():
    return {}["key"]

TEXTS = ["a"]
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources are named relative to the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(name: str, content: str | bytes) -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return name


def message(kind: type[TrlxError], load: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(kind) as error:
        load(*args)
    return str(error.value)


# Files that can be read.


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.txt", "one\n\n two \r\n   \nth\u2028ree", ["one", " two ", "th\u2028ree"]),
        ("a.txt", b"\xef\xbb\xbfone\n", ["one"]),
        ("a.TXT", "one", ["one"]),
        ("a.jsonl", '"one"\n\n{"prompt": "two", "k": [1]}\n', ["one", {"prompt": "two", "k": [1]}]),
        ("a.jsonl", '{"prompt": "one"}\n{"prompt": "two"}', ["one", "two"]),
        ("a.jsonl", '{"prompt": "one"}\n{"prompt": "two", "k": 1}', [{"prompt": "one"}, {"prompt": "two", "k": 1}]),
        ("a.jsonl", '"th\u2028ree"\r\n', ["th\u2028ree"]),
        ("a.json", '["one", {"prompt": "two"}]', ["one", {"prompt": "two"}]),
        ("a.csv", 'prompt,level\n"one, ""1""",2\n\n"tw\no",\n', [('one, "1"', "2"), ("tw\no", "")]),
        ("a.tsv", "prompt\tlevel\none, two\t2\n", [("one, two", "2")]),
        ("a.csv", "prompt\none\ntwo\n", ["one", "two"]),
        ("a.csv", "text\none\n", ["one"]),
        ("a.csv", f"prompt\n{'long ' * 100_000}\n", ["long " * 100_000]),  # csv's own limit is 131,072
    ],
)
def test_prompts_in_files(name: str, content: str | bytes, rows: list[Any]) -> None:
    wanted = [dict(zip(("prompt", "level"), row, strict=True)) if isinstance(row, tuple) else row for row in rows]
    assert load_rows(written(name, content), "data.prompts") == wanted


def test_samples_may_be_dialogues() -> None:
    file = written("a.jsonl", '["q", "a"]\n"text"\n{"prompt": "q", "output": "a"}\n')
    assert load_rows(file, "data.samples") == [["q", "a"], "text", {"prompt": "q", "output": "a"}]


def test_parquet() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], "level": [1, 2]}), "two.parquet")
    parquet.write_table(pyarrow.table({"text": ["a", "b"]}), "one.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["a", None], "level": [1, 2]}), "null.parquet")
    assert load_rows("two.parquet", "data.prompts") == [{"prompt": "a", "level": 1}, {"prompt": "b", "level": 2}]
    assert load_rows("one.parquet", "data.samples") == ["a", "b"]
    assert message(DataError, load_rows, "null.parquet", "data.prompts") == (
        'data.prompts: null.parquet[1] must be text or messages, or have either under "prompt", not an object with '
        "prompt, level."
    )
    file = written("bad.parquet", "text")
    assert message(DataError, load_rows, file, "data.prompts").startswith(
        "data.prompts: bad.parquet is not a Parquet file: "
    )


def test_a_path_with_home_and_a_windows_path(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    monkeypatch.setenv("HOME", str(here))
    monkeypatch.setenv("USERPROFILE", str(here))
    written("a.txt", "one")
    assert load_rows("~/a.txt", "data.prompts") == ["one"]
    # A drive's colon makes neither a module nor a dataset of it.
    assert "there is no such file" in message(ConfigError, load_rows, r"C:\x\prompts.txt", "data.prompts")
    assert "must be a file" in message(ConfigError, load_rows, r"C:\x\prompts", "data.prompts")


@pytest.mark.parametrize(
    ("name", "content", "numbers"),
    [
        ("a.txt", "1\n-2.5e-1\n", [1.0, -0.25]),
        ("a.jsonl", "1\n2\n", [1.0, 2.0]),
        ("a.jsonl", '{"prompt": "q", "output": "a", "reward": 3}\n', [3.0]),
        ("a.csv", "score\n1\n2\n", [1.0, 2.0]),
        ("a.csv", "prompt,reward\nq,1\n", [1.0]),
    ],
)
def test_rewards_are_numbers(name: str, content: str, numbers: list[float]) -> None:
    rewards = load_rows(written(name, content), "data.rewards")
    assert rewards == numbers
    assert {type(reward) for reward in rewards} == {float}


def test_a_sample_may_have_several_rewards() -> None:
    rewards = load_rows(written("a.jsonl", '[1, 2]\n{"reward": [3, 0.5]}\n4\n'), "data.rewards")
    assert rewards == [[1.0, 2.0], [3.0, 0.5], 4.0]


# Files that cannot.


@pytest.mark.parametrize(
    ("option", "name", "content", "sentence"),
    [
        (
            "prompts",
            "a.jsonl",
            '"a"\n\n{"prompt": }\n',
            "a.jsonl:3 is not JSON: Expecting value: line 1 column 12 (char 11).",
        ),
        ("prompts", "a.jsonl", "1" * 5000, "a.jsonl:1 is not JSON: "),
        ("prompts", "a.jsonl", "[" * 100000, "a.jsonl:1 is not JSON: "),
        ("prompts", "a.json", '["a",\n"b"\n"c"]', "a.json:3 is not JSON: Expecting ',' delimiter"),
        ("prompts", "a.json", '{"prompt": "a"}', "a.json must hold a list of rows, not an object with prompt."),
        ("prompts", "a.json", "[" * 100000, "a.json is nested too deeply."),
        ("prompts", "a.json", f"[{'1' * 5000}]", "a.json is not JSON: Exceeds the limit (4300 digits)"),
        ("prompts", "a.csv", "prompt,level\na,1\nb\n", "a.csv:3 has 1 cells for 2 columns."),
        ("prompts", "a.csv", "prompt,level\na,1,2\n", "a.csv:2 has 3 cells for 2 columns."),
        ("prompts", "a.csv", "prompt,prompt\na,1\n", "a.csv:1 must name every column once, not 'prompt', 'prompt'."),
        ("prompts", "a.csv", 'prompt,level\n"a,1\nb,2\n', "a.csv:3 is not CSV: unexpected end of data."),
        ("prompts", "a.txt", " \n\n", "a.txt has no rows."),
        ("prompts", "a.csv", "", "a.csv has no rows."),
        ("prompts", "a.json", "[]", "a.json has no rows."),
        (
            "prompts",
            "a.jsonl",
            '"a"\n\n{"words": "q", "answer": "a"}\n',
            'a.jsonl:3 must be text or messages, or have either under "prompt", not an object with words, answer.',
        ),
        (
            "eval_prompts",
            "a.jsonl",
            '"a"\nnull\n',
            'a.jsonl:2 must be text or messages, or have either under "prompt", not null.',
        ),
        (
            "preferences",
            "a.jsonl",
            '{"chosen": "a", "rejected": "b"}\n["a", "b", "c"]\n{"chosen": "a"}\n',
            "a.jsonl:3 must be an object with chosen and rejected, or a list of prompt, chosen and rejected, not an "
            "object with chosen.",
        ),
        ("samples", "a.json", "[[], 5]", "a.json[1] must be text, a list of texts, or an object, not 5."),
        (
            "rewards",
            "a.txt",
            "1\n\nhigh\n",
            "a.txt:3 must be a finite number, or have one under \"reward\", not 'high'.",
        ),
        ("rewards", "a.jsonl", "1\nNaN\n", 'a.jsonl:2 must be a finite number, or have one under "reward", not NaN.'),
        ("rewards", "a.jsonl", "true\n", 'a.jsonl:1 must be a finite number, or have one under "reward", not true.'),
        ("rewards", "a.jsonl", "1" * 400, 'a.jsonl:1 must be a finite number, or have one under "reward", not 1'),
        (
            "rewards",
            "a.csv",
            "prompt,points\na,1\n",
            'a.csv:2 must be a finite number, or have one under "reward", not an object with prompt, points.',
        ),
    ],
)
def test_rows_that_cannot_be_used_are_named_by_file_and_line(
    option: str, name: str, content: str | bytes, sentence: str
) -> None:
    given = message(DataError, load_rows, written(name, content), f"data.{option}")
    assert given.startswith(f"data.{option}: {sentence}")
    assert "\n" not in given


def test_a_file_that_is_not_there(here: Path) -> None:
    assert message(ConfigError, load_rows, "a.txt", "data.prompts") == (
        f"data.prompts ('a.txt'): there is no such file in {here}."
    )
    Path("b.txt").mkdir()
    assert message(ConfigError, load_rows, "b.txt", "data.prompts") == "data.prompts ('b.txt'): is a folder."


def test_a_file_that_is_no_text(here: Path) -> None:
    Path("a.txt").write_bytes(b"good\nb\xe9d\n")
    sentence = "data.prompts ('a.txt'): is not UTF-8 text (byte 6)."
    assert message(DataError, load_rows, "a.txt", "data.prompts") == sentence


def test_a_file_of_another_kind() -> None:
    written("prompts.xlsx", "")
    assert message(ConfigError, load_rows, "prompts.xlsx", "data.prompts") == (
        "data.prompts ('prompts.xlsx'): a file of data must end in .txt, .jsonl, .json, .csv, .tsv or .parquet."
    )


# Lists.


def test_a_list_is_taken_as_it_is() -> None:
    prompts = ["a", {"prompt": "b", "k": 1}]
    rows = load_rows(prompts, "data.prompts")
    assert rows == prompts and rows is not prompts
    assert rows[1] is prompts[1]
    assert message(DataError, load_rows, ["a", 5], "data.prompts") == (
        'data.prompts: data.prompts[1] must be text or messages, or have either under "prompt", not 5.'
    )


# Functions.


def test_functions_of_files_and_modules(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written("folder/my_data.py", FUNCTIONS)
    written("my_package/__init__.py", "")
    written("my_package/data.py", FUNCTIONS)
    written("my_module.py", FUNCTIONS)
    rows = [{"prompt": "a", "level": 1}, {"prompt": "b", "level": 1}]
    assert load_rows("folder/my_data.py:rows", "data.prompts") == rows
    assert load_rows(f"{here}/folder/my_data.py:rows", "data.prompts") == rows
    assert load_rows("my_package.data:rows", "data.prompts") == rows
    assert load_rows("my_module:rows", "data.prompts") == rows
    assert load_rows("my_module:one_column", "data.prompts") == [{"prompt": "a"}]  # as it was made
    assert load_rows("my_module:numbers", "data.rewards") == [1.0, 2.5]


@pytest.mark.parametrize(
    ("function", "option", "sentence"),
    [
        ("nothing", "prompts", "f.py:nothing() has no rows."),
        ("word", "prompts", "f.py:word() must return a list of rows, not 'abc'."),
        ("texts", "rewards", "f.py:texts()[0] must be a finite number, or have one under \"reward\", not 'a'."),
    ],
)
def test_functions_that_return_something_else(function: str, option: str, sentence: str) -> None:
    written("f.py", FUNCTIONS)
    assert message(DataError, load_rows, f"f.py:{function}", f"data.{option}") == f"data.{option}: {sentence}"


def test_functions_that_raise(here: Path) -> None:
    written("f.py", FUNCTIONS)
    line = FUNCTIONS.split("\n").index('    return {}["key"]') + 1
    assert message(DataError, load_rows, "f.py:fails", "data.prompts") == (
        f"data.prompts: f.py:fails() must return a list of rows. KeyError: 'key' ({here / 'f.py'}:{line})"
    )
    assert "must return a list of rows. TypeError: 'int' object is not iterable" in message(
        DataError, load_rows, "f.py:number", "data.prompts"
    )


def test_functions_that_are_not_there() -> None:
    written("f.py", FUNCTIONS)
    assert message(ConfigError, load_function, "f.py:row", "data.reward_fn") == (
        "data.reward_fn ('f.py:row'): f.py has no 'row'."
    )
    assert message(ConfigError, load_function, "f.py:TEXTS", "data.reward_fn") == (
        "data.reward_fn ('f.py:TEXTS') must be a function, not a list."
    )
    for spec in ("rewards", "f.py", "f.py:", ":f"):
        assert "must be module:function or path/to/file.py:function" in message(
            ConfigError, load_function, spec, "data.reward_fn"
        )
    assert "there is no file g.py" in message(ConfigError, load_rows, "g.py:rows", "data.prompts")
    assert "No module named 'no_package'" in message(ConfigError, load_rows, "no_package.data:rows", "data.prompts")


def test_a_module_that_raises_is_a_sentence_with_the_place(here: Path) -> None:
    written("broken.py", "import json\njson.loads(undefined)\n")
    written("unfinished.py", "def f(:\n")
    assert message(ConfigError, load_function, "broken.py:f", "data.reward_fn") == (
        "data.reward_fn ('broken.py:f') cannot be imported: NameError: name 'undefined' is not defined "
        f"({here / 'broken.py'}:2)"
    )
    assert message(ConfigError, load_function, "unfinished.py:f", "data.reward_fn").endswith(
        "SyntaxError: invalid syntax (unfinished.py, line 1)"
    )


def test_the_function_itself_is_what_is_loaded() -> None:
    written("f.py", FUNCTIONS)
    assert load_function("f.py:texts", "data.reward_fn")() == ["a", "b"]


# Datasets.


def test_a_dataset_in_a_folder_with_its_splits(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", here / "cache")
    written("words/train.jsonl", '{"prompt": "a", "k": 1}\n{"prompt": "b", "k": 2}\n')
    written("words/test.jsonl", '{"prompt": "c", "k": 3}\n')
    assert load_rows("words", "data.prompts") == [{"prompt": "a", "k": 1}, {"prompt": "b", "k": 2}]
    assert load_rows("words:test", "data.prompts") == [{"prompt": "c", "k": 3}]
    assert load_rows(f"{here}/words:train[1:]", "data.prompts") == [{"prompt": "b", "k": 2}]
    assert re.fullmatch(
        r"data.prompts \('words:dev'\) cannot be loaded. Unknown split \"dev\". Should be one of .*",
        message(ConfigError, load_rows, "words:dev", "data.prompts"),
    )


def test_a_check_reads_the_first_row_of_a_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", here / "cache")
    written("words/train.jsonl", '{"prompt": "a"}\n{"prompt": "b"}\n')
    written("model/tokenizer.json", '{"hidden_size": 8}')
    written("notes/readme.xyz", "hello")
    assert check_source("words:train[1:]", "data.prompts") == ("dataset words:train[1:]", [])
    wrong = {
        "words:dev": "cannot be loaded. Bad split: dev",
        "notes": "A folder of data has files such as train.jsonl or train.parquet.",
        "model": "model[0] must be text or messages",
    }
    for spec, words in wrong.items():
        assert words in message(TrlxError, check_source, spec, "data.prompts")
    assert not list(here.glob("cache/**/*.arrow"))


def test_a_module_here_comes_before_a_dataset_of_that_name() -> None:
    written("sentences.py", "def train():\n    return ['from Python']\n")
    assert load_rows("sentences:train", "data.prompts") == ["from Python"]


def test_a_dataset_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    # As HF_HUB_OFFLINE=1 would, had it been set when the libraries were imported.
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for spec, name in (("nobody/no_such_words:test", "nobody/no_such_words"), ("promts", "promts")):
        given = message(ConfigError, load_rows, spec, "data.prompts")
        assert given.startswith(
            f"data.prompts ({spec!r}) cannot be loaded. There is no file, folder or module {name} here, and as a "
            f"dataset of the hub: Couldn't reach '{name}' on the Hub"
        )
        assert "\n" not in given


def test_without_the_packages_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("datasets", "pyarrow"):
        monkeypatch.setitem(sys.modules, package, None)
    written("a.parquet", "")
    for spec, what in (("owner/words", "a dataset"), ("a.parquet", "a .parquet file")):
        given = message(ConfigError, load_rows, spec, "data.prompts")
        assert given.startswith(f"data.prompts: {what} needs packages that are not installed")
        assert given.endswith(f"{install_hint('datasets')}.")


@pytest.mark.parametrize("spec", ["", "what is this", "a/b/c", "/no/such/folder", "no/such:folder/x", ":train"])
def test_what_is_no_source_at_all(spec: str) -> None:
    given = message(ConfigError, check_source, spec, "data.prompts")
    assert given.startswith(f"data.prompts ({spec!r}) must be a file (.txt, ")


# What `check` says.


def test_a_check_reads_files_but_calls_nothing() -> None:
    pytest.importorskip("datasets")
    written("f.py", FUNCTIONS)
    written("a.txt", "one\ntwo\n")
    assert check_source("a.txt", "data.prompts") == ("2 rows of a.txt", ["one", "two"])
    assert check_source(["a"], "data.prompts") == ("1 row", ["a"])
    assert check_source("f.py:fails", "data.prompts") == ("what f.py:fails returns", [])
    assert check_source("owner/words:test", "data.prompts") == ("dataset owner/words:test", [])
    assert "has no 'row'" in message(ConfigError, check_source, "f.py:row", "data.prompts")
    assert "a.txt:1 must be a finite number" in message(DataError, check_source, "a.txt", "data.rewards")
