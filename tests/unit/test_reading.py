"""Reading of files: what is no regular file is refused at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trlx_like.reading import read_bytes, unwritable


def test_a_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    assert read_bytes(tmp_path / "a") == read_bytes(tmp_path / "a", 5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes; at most 4 are read"):
        read_bytes(tmp_path / "a", 4)


def test_what_is_no_file_is_refused_without_opening_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a pipe, not a file"):
        read_bytes(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a device, not a file"):
        read_bytes(Path("/dev/zero"))
    (tmp_path / "link").symlink_to("/proc/self/status")
    with pytest.raises(OSError, match="it is a file of the kernel, not a file"):
        read_bytes(tmp_path / "link")
    with pytest.raises(OSError, match="the character NUL"):
        read_bytes(Path("a\0b"))
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "nothing")


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    assert unwritable("a") is unwritable("\N{GRINNING FACE}") is None
    assert unwritable("ab\udc00") == "character 3 is half of a surrogate pair (\\udc00), not text"
