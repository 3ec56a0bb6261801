"""`trlx-like push` with the client of huggingface_hub, against a hub on loopback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli_support import said
from tests.unit.sharing.hub_server import served


def test_a_push_that_fails_goes_on_where_it_was(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(monkeypatch) as hub:
        hub.fails = 9
        assert "me/thing: the upload failed: " in said(2, "push", tuned, "me/thing", "--private")
        assert not hub.files and len(hub.objects) == 1  # the first of two large files arrived
        hub.fails, hub.uploads = 0, 0
        assert f"{hub.url}/me/thing" in said(0, "push", tuned, "me/thing", "--private")
    assert hub.uploads == 1 and len(hub.objects) == 2
    assert [one["visibility"] for one in hub.made] == ["private"] * 2
    checkpoint = tuned / "best_checkpoint" / "hf_model"
    for name in ("adapter_model.safetensors", "heads.safetensors", "tokenizer.json"):
        assert hub.files[name] == (checkpoint / name).read_bytes()
    assert b"# me/thing" in hub.files["README.md"] and b"<svg" in hub.files["training.svg"]


def test_a_dry_run_uses_no_network(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(monkeypatch) as hub:
        text = said(0, "push", tuned, "me/thing", "--dry-run", "--merge")
    assert text.startswith("Would upload") and "model.safetensors (" in text and not hub.made


def test_names_that_are_none_are_refused(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(monkeypatch) as hub:
        for words in (["a/b/c"], ["a b", "--dry-run"]):
            assert "must be the name of a repository" in said(2, "push", tuned, *words)
    assert not hub.made
