"""Data that was encoded before: found by what it was made from, made again if damaged, bounded, and private."""

from __future__ import annotations

import errno
import io
import logging
import os
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from transformers import MBart50Tokenizer

from tests.tiny import tiny_tokenizer
from tests.unit.pipelines.templates import CHATML, chat_tokenizer
from trlx_like.errors import DataError
from trlx_like.pipelines import prepared
from trlx_like.pipelines.dialogues import encode_dialogues
from trlx_like.pipelines.preferences import encode_preferences
from trlx_like.pipelines.prompts import PromptPipeline
from trlx_like.pipelines.tokens import TextEncoder

SAMPLES = [["ab", "c"], "abc", {"prompt": "a", "output": "bcd"}]
PAIRS = [("abc", "de", "e"), {"prompt": "ab", "chosen": "c", "rejected": "d", "margin": 2.0}]


def samples(rows: Sequence[Any] = SAMPLES, tokenizer: Any = None, longest: int = 20, **options: Any) -> Any:
    return encode_dialogues(rows, tokenizer or tiny_tokenizer(), longest, **options)


def pairs() -> Any:
    return encode_preferences(PAIRS, tiny_tokenizer(), max_length=20)


def prompts() -> Any:
    return PromptPipeline(["ab", {"prompt": "c", "level": 2}], 20, tiny_tokenizer()).ids


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of prepared data, which also keeps a few rows."""
    monkeypatch.setenv(prepared.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(prepared, "FEWEST", 1)
    return tmp_path / "cache"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are given to the tokenizer."""
    texts: list[str] = []
    ahead = TextEncoder.read_ahead

    def watched(self: TextEncoder, given: Any) -> None:
        texts.extend(listed := list(given))
        ahead(self, listed)

    monkeypatch.setattr(TextEncoder, "read_ahead", watched)
    return texts


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("encode", [samples, pairs, prompts])
def test_the_same_data_is_read_once(encode: Callable[[], Any], folder: Path, read: list[str]) -> None:
    first = list(encode())
    asked = len(read)
    assert asked > 0 and list(encode()) == first
    assert len(read) == asked and len(files(folder)) == 1


def test_few_rows_and_an_empty_variable_leave_no_file(
    folder: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "FEWEST", len(SAMPLES) + 1)
    samples()
    monkeypatch.setattr(prepared, "FEWEST", len(SAMPLES))
    monkeypatch.setenv(prepared.VARIABLE, "")
    samples()
    assert files(folder) == [] and len(read) == 2 * 5


def test_the_folder_is_that_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(prepared.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert prepared.cache_folder() == tmp_path / "trlx_like"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prepared.cache_folder() == tmp_path / ".cache" / "trlx_like"


def test_other_data_options_and_tokenizers_are_others(folder: Path) -> None:
    left, added, marked, split = tiny_tokenizer(), tiny_tokenizer(), chat_tokenizer(CHATML), tiny_tokenizer()
    left.truncation_side = "left"
    split.split_special_tokens = True
    added.add_tokens(["abc"])
    for number, encode in enumerate(
        (
            samples,
            lambda: samples([*SAMPLES[:2], {"prompt": "a", "output": "bce"}]),
            lambda: samples([SAMPLES[1], SAMPLES[0], SAMPLES[2]]),
            lambda: samples(longest=19),
            lambda: samples(rewards=[1.0, 2.0, 3.0]),
            lambda: samples(rewards=[1.0, 2.0, 3.5]),
            lambda: samples(template={"tools": []}),
            lambda: samples(tokenizer=left),
            lambda: samples(tokenizer=added),
            lambda: samples(tokenizer=split),
            lambda: samples(tokenizer=marked),
            lambda: PromptPipeline(["a"], 20, tiny_tokenizer()),
        ),
        start=1,
    ):
        encode()
        encode()
        assert len(files(folder)) == number


def test_outputs_in_another_language_are_others(folder: Path) -> None:
    def begins(language: str) -> str:
        tokenizer = MBart50Tokenizer(
            [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581a", -1.0)], tgt_lang=language
        )
        (dialogue,) = samples([{"prompt": "a", "output": "a"}], tokenizer, seq2seq=True)
        output = [number for number, counts in zip(dialogue.ids, dialogue.is_output, strict=True) if counts]
        return str(tokenizer.decode(output[:1]))

    assert [begins("fr_XX"), begins("de_DE")] == ["fr_XX", "de_DE"] and len(files(folder)) == 2


def test_what_has_no_sure_digest_is_not_kept(folder: Path) -> None:
    class Own(type(tiny_tokenizer())):  # type: ignore[misc]
        """A tokenizer with code of its own."""

    tokenizer = tiny_tokenizer()
    tokenizer.__class__ = Own
    samples(tokenizer=tokenizer)
    assert [dialogue.ids for dialogue in samples([{"prompt": "a", "output": "b", "more": object()}])] == [[2, 3, 0]]
    assert files(folder) == []


def test_a_template_that_writes_the_date_is_read_again_on_the_next_day(monkeypatch: pytest.MonkeyPatch) -> None:
    class Day(prepared.date):  # type: ignore[name-defined, misc]
        said = "2026-11-22"

        @classmethod
        def today(cls) -> Any:
            return cls.fromisoformat(cls.said)

    monkeypatch.setattr(prepared, "date", Day)
    plain, dated = chat_tokenizer(CHATML), chat_tokenizer("{{ strftime_now('%d') }}" + CHATML)
    before = prepared.digest(plain, []), prepared.digest(dated, [])
    Day.said = "2026-11-23"
    assert prepared.digest(plain, []) == before[0] and prepared.digest(dated, []) != before[1]


@pytest.mark.parametrize("damage", ["a bit", "the end", "all"])
def test_a_damaged_file_is_made_again(
    damage: str, folder: Path, read: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    first = list(samples())
    asked, (path,) = len(read), files(folder)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes({"a bit": bytes(content), "the end": bytes(content[:-3]), "all": b""}[damage])
    with caplog.at_level(logging.WARNING, "trlx_like"):
        assert list(samples()) == first and len(read) == 2 * asked
    assert f"{path} is damaged and was removed; the data is prepared again." in caplog.text
    assert list(samples()) == first and len(read) == 2 * asked and files(folder) == [path]


def test_processes_that_prepare_the_same_data_do_not_disturb_each_other(folder: Path) -> None:
    expected, found = list(samples()), []
    files(folder)[0].unlink()
    threads = [Thread(target=lambda: found.append(list(samples()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4 and len(files(folder)) == 1


def test_the_file_is_private_and_mapped(folder: Path) -> None:
    found = samples()
    (path,) = files(folder)
    assert [stat.S_IMODE(place.stat().st_mode) for place in (folder, path)] == [0o700, 0o600]
    if Path("/proc/self/maps").exists():
        assert str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert found[0].ids == [2, 3, 4, 0]


def test_the_oldest_files_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for row in ("a", "b", "c"):
        samples([row + "d"])
    first, second, third = sorted(files(folder), key=lambda path: path.stat().st_mtime_ns)
    size = first.stat().st_size
    for age, path in enumerate((second, third, first)):
        os.utime(path, (1000 - age, 1000 - age))
    left = folder / ".killed-0"
    left.touch()
    os.utime(left, (1, 1))
    monkeypatch.setattr(prepared, "MOST_BYTES", 3 * size)
    samples(["dd"])
    kept = files(folder)
    assert len(kept) == 3 and {second, third} < {*kept}


def test_a_folder_that_cannot_be_written_does_not_stop_a_run(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file")
    with caplog.at_level(logging.WARNING, "trlx_like"):
        assert samples()[1].ids == [2, 3, 4, 0]
        folder.unlink()
        monkeypatch.setattr(prepared, "MOST_BYTES", 10)
        assert samples()[1].ids == [2, 3, 4, 0]
    assert f"Prepared data cannot be kept in {folder}" in caplog.text and "set TRLX_LIKE_CACHE" in caplog.text
    assert "too little space" in caplog.text and files(folder) == []


def test_a_folder_that_can_only_be_read_is_used(
    folder: Path, read: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*given: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    first, asked = list(samples()), len(read)
    monkeypatch.setattr(os, "utime", refused)  # what such a file system does, also for root
    with caplog.at_level(logging.WARNING, "trlx_like"):
        assert list(samples()) == first and len(read) == asked
    assert not caplog.text


def test_a_user_without_home_directory_does_not_stop_a_run(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(prepared.VARIABLE, "~nouser/x")
    with caplog.at_level(logging.WARNING, "trlx_like"):
        assert samples()[1].ids == [2, 3, 4, 0]
        monkeypatch.delenv(prepared.VARIABLE)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without HOME and an entry in passwd
        assert samples()[1].ids == [2, 3, 4, 0]
    assert "cannot be kept in ~nouser/x" in caplog.text and "cannot be kept in ~/.cache" in caplog.text
    assert "set TRLX_LIKE_CACHE" in caplog.text


def test_warnings_and_errors_come_each_time(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trlx_like"):
        for _ in range(2):
            samples([["ab", "cd"], "a"], longest=3)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and lines[0] == lines[1] and "1 of 2 samples are longer" in lines[0]
    for _ in range(2):
        with pytest.raises(DataError, match=r"samples\[1\]: no output is left .* shorten its prompt"):
            samples(["ab", ["abcd", "e"]], longest=3)


def test_rows_are_numbered_over_all_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "CHUNK", 2)
    assert [dialogue.ids for dialogue in samples(["a", "b", "c", "d", "a"])] == [[2, 0], [3, 0], [4, 0], [5, 0], [2, 0]]
    with pytest.raises(DataError, match=r"samples\[3\] is a int"):
        samples(["a", "b", "c", 3])
    with pytest.raises(DataError, match=r"prompts\[4\] is a int"):
        PromptPipeline(["a", "b", "c", "d", 4], 20, tiny_tokenizer())  # type: ignore[list-item]


def test_long_work_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(prepared, "CHUNK", 2)
    monkeypatch.setattr(prepared, "SECONDS", -1)
    with caplog.at_level(logging.INFO, "trlx_like"):
        samples(["a", "b", "c"])
    assert "samples: 2 of 3 rows are prepared." in caplog.text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("rows", "level", "bar"), [(3, "INFO", True), (2, "INFO", False), (3, "WARNING", False)])
def test_a_terminal_shows_a_bar_for_many_rows_on_one_process(
    rows: int, level: str, bar: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prepared, "FEWEST", 3)
    monkeypatch.setenv(prepared.VARIABLE, "")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with caplog.at_level(level, "trlx_like"):
        assert len(samples(["a", "b", "c"][:rows], name="examples")) == rows
    assert ("examples" in terminal.getvalue() and "100%" in terminal.getvalue()) == bar
