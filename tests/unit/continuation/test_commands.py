"""`trlx-like chat` on a run with a chat template, with the lines of a person on its standard input."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.unit.cli_support import COMMAND, said

GREEDY = ["--max-new-tokens", "6", "--temperature", "0"]


def talk(run: Path, lines: str, *words: str) -> list[str]:
    """The answers of `trlx-like chat` to lines, which stand on the lines with its mark."""
    result = CliRunner().invoke(COMMAND, ["chat", str(run), *GREEDY, *words], input=lines)
    assert result.exit_code == 0, result.output
    first, *answers = result.stdout.split("> ")
    assert first == ""
    return [answer.removesuffix("\n") for answer in answers]


def continued(run: Path, prompt: str) -> str:
    """The continuation of a prompt as it stands."""
    text = said(0, "generate", run, "--prompt", prompt, *GREEDY).removesuffix("\n")
    assert text.startswith(prompt)
    return text.removeprefix(prompt)


def test_the_dialogue_is_kept_until_an_empty_line(talking: Path) -> None:
    first, second, new, again, _ = talk(talking, "hi\nyo\n\nhi\n", "--system", "x")
    opening = "calm system x user hi assistant "
    assert first == continued(talking, opening) == again
    assert second == continued(talking, f"{opening}{first} user yo assistant ")
    assert new == ""


def test_a_dialogue_that_is_too_long_loses_its_beginning(talking: Path) -> None:
    assert len(talk(talking, "hello\n" * 6)) == 7  # each exchange has about 30 of the 64 positions


def test_an_answer_has_half_of_a_short_context_by_default(talking: Path, caplog: pytest.LogCaptureFixture) -> None:
    greedy = ["--temperature", "0"]
    result = CliRunner().invoke(COMMAND, ["chat", str(talking), *greedy], input="hi\n")
    assert result.exit_code == 0, result.output
    assert "The model has 64 positions: at most 32 new tokens are written." in caplog.text
    assert (
        result.stdout
        == CliRunner().invoke(COMMAND, ["chat", str(talking), *greedy, "--max-new-tokens", "32"], input="hi\n").stdout
    )


def test_a_model_without_a_template(talking: Path) -> None:
    model = talking.parent / "model"
    refused = f"{model} has no chat template. Continue text with `trlx-like generate --prompt`"
    assert refused in said(2, "chat", model, *GREEDY)
