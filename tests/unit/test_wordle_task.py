"""The Wordle example: clues by hand, the anchors of the benchmark, the data, and the letter tokenizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.play import Score, play
from examples.wordle import task
from examples.wordle.task import LETTERS, OPENING, TRIES, WORDS, Data, Game, Wordle, default_wordle, line


@pytest.mark.parametrize(
    ("guess", "hidden", "clue"),
    [
        ("apple", "apple", "ag pg pg lg eg\n"),
        ("apple", "about", "ag pb pb lb eb\n"),
        ("apple", "peach", "ay py py lb ey\n"),  # both p are yellow: the one p is not counted
        ("peach", "apple", "py ey ay cb hb\n"),
        ("about", "actor", "ag bb oy ub ty\n"),
    ],
)
def test_clues_by_hand(guess: str, hidden: str, clue: str) -> None:
    words = sorted({guess, hidden})
    assert Wordle(words).clue_line(words.index(guess), words.index(hidden)) == clue


def test_a_game_by_hand() -> None:
    wordle = Wordle(["about", "actor", "apple"])
    game = Game(wordle, 0)
    for said in ["a p p l e\n", "a p p l\n", "apple", "ap p l e", "a b o u t"]:
        assert not game.over
        game.say(said)
    assert (game.over, game.rewards) == (True, [-1, -1, -1, -1, 0])
    assert game.text == "Wordle:\na p p l e\nag pb pb lb eb\na p p l\nnone\napple\nnone\nap p l e\nnone\na b o u t\n"
    lost = Game(wordle, 0)
    for _ in range(TRIES):
        lost.say("a c t o r\n")
    assert (lost.over, lost.score) == (True, -6)
    assert len(lost.turns) == 2 * TRIES and lost.turns[-1] == "a c t o r\n"


def test_the_words() -> None:
    assert len(set(WORDS)) == len(WORDS) == 431
    assert all(len(word) == LETTERS and word.isalpha() and word.islower() for word in WORDS)


def test_the_anchors_of_the_benchmark() -> None:
    """There, with other words: data -4.12 (its code gives -4.07, .716 solved), any fitting word -2.38, best -1.94."""
    wordle, rng = default_wordle(), np.random.default_rng(0)
    hidden = np.tile(np.arange(len(WORDS)), 5)

    def score(smart: float) -> tuple[float, float]:
        games = wordle.play_randomly(hidden, smart, rng)
        scores = [wordle.score(guesses, word) for guesses, word in zip(games, hidden, strict=True)]
        return float(np.mean(scores)), float(np.mean([value > -TRIES for value in scores]))

    mean, solved = score(task.SMART)
    assert mean == pytest.approx(-4.07, abs=0.08) and solved == pytest.approx(0.705, abs=0.03)
    mean, solved = score(1.0)
    assert mean == pytest.approx(-2.34, abs=0.05) and solved > 0.99
    # Any word at all: right at each try with probability p = 1 / 431, and then 6, 5, .. 1 less wrong guesses.
    p = 1 / 431
    expected = -6 + sum((6 - k) * p * (1 - p) ** k for k in range(6))
    assert score(0.0)[0] == pytest.approx(expected, abs=0.03)


def test_the_most_telling_word() -> None:
    # Of three words, "about" tells the other two apart (gbbbb, gbyby): 0 + 1 + 1 wrong guesses over 3 words.
    assert Wordle(["about", "actor", "apple"]).informed_score() == pytest.approx(-2 / 3)


def test_games_take_guesses_that_fit() -> None:
    wordle = default_wordle()
    hidden = np.arange(50)
    for word, guesses in zip(hidden, wordle.play_randomly(hidden, 1.0, np.random.default_rng(4)), strict=True):
        for turn, guess in enumerate(guesses):
            clues = [wordle.clues[earlier, word] == wordle.clues[earlier, guess] for earlier in guesses[:turn]]
            assert all(clues)
            assert (guess == word) == (turn == len(guesses) - 1) or len(guesses) == TRIES


def test_the_data() -> None:
    data = task.record(default_wordle(), episodes=2000, seed=5)
    assert isinstance(data, Data)
    score = Score.of(sum(rewards) for rewards in data.rewards)
    assert abs(score.mean + 4.07) < 4 * score.error
    for turns, rewards in zip(data.samples, data.rewards, strict=True):
        assert turns[0] == OPENING and len(turns) == 2 * len(rewards)
    assert task.record(default_wordle(), 5, seed=2).samples == task.record(default_wordle(), 5, seed=2).samples


def test_the_same_words_always_score_as_the_words_do() -> None:
    wordle = default_wordle()
    episodes = [Game(wordle, word) for word in range(len(WORDS))]
    scores = play(lambda texts: [line("about") for _ in texts], episodes)
    assert scores.count(0) == 1 and scores.count(-6) == len(WORDS) - 1


def test_a_letter_is_a_token(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    task.tokenizer().save_pretrained(tmp_path)
    text = OPENING + line("stone") + "sb ty ob nb eg\n" + "z e\nnone\n" + line("zebra")
    for tokenizer in (task.tokenizer(), AutoTokenizer.from_pretrained(tmp_path)):
        ids = tokenizer.encode(text)
        assert len(ids) == 1 + 5 + 5 + 3 + 5
        assert tokenizer.decode(ids) == " ".join(text.split())
        assert tokenizer.unk_token_id not in ids
    longest = 1 + TRIES * LETTERS + (TRIES - 1) * LETTERS
    assert task.model_config().max_position_embeddings > longest
    assert task.model_config().vocab_size == len(task.tokenizer())


def test_the_data_needs_no_torch() -> None:
    code = "import sys; from examples.wordle.task import *; record(Wordle(), 9); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)
