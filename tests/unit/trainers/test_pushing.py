"""`train.push_to_hub`: the upload when training ends, which never fails a run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.contract.recipes import make
from tests.unit.sharing.hub_server import served
from trlx_like.errors import ConfigError


def test_a_run_is_uploaded_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with served(monkeypatch) as hub:
        make("SFTTrainer", tmp_path / "run", **{"train.push_to_hub": "me/thing"}).learn()
    assert b"# me/thing" in hub.files["README.md"] and "model.safetensors" in hub.files
    assert hub.made[0]["visibility"] == "private" and "trlx-like push" not in caplog.text


def test_an_upload_that_fails_does_not_fail_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make("SFTTrainer", tmp_path / "run", **{"train.push_to_hub": "me/thing"})
    with caplog.at_level(logging.WARNING, "trlx_like"):
        trainer.learn()  # the tests are offline
    assert trainer.finished
    assert f"Do it again with: trlx-like push {tmp_path / 'run'} me/thing --private" in caplog.text


def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.push_to_hub: must be owner/name or null, got 'thing'"):
        make("SFTTrainer", tmp_path, **{"train.push_to_hub": "thing"})
