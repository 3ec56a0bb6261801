"""The Wordle example: clues by hand, the anchors of the benchmark, the data, the tokenizer and the first weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.play import Score, play
from examples.wordle import task
from examples.wordle.gap import fitting, guesses_fit, opening_with, perfect_reader
from examples.wordle.task import LETTERS, OPENING, TRIES, WORDS, Data, Game, Wordle, default_wordle


@pytest.mark.parametrize(
    ("guess", "hidden", "clue"),
    [
        ("apple", "apple", "a1! p2! p3! l4! e5!\n"),
        ("apple", "about", "a1! p- p- l- e-\n"),
        ("apple", "peach", "a1? p2? p3? l- e5?\n"),  # both p are yellow: the one p is not counted
        ("peach", "apple", "p1? e2? a3? c- h-\n"),
        ("about", "actor", "a1! b- o3? u- t5?\n"),
    ],
)
def test_clues_by_hand(guess: str, hidden: str, clue: str) -> None:
    words = sorted({guess, hidden})
    assert Wordle(words).clue_line(words.index(guess), words.index(hidden)) == clue


def test_a_word_fits_where_every_fact_of_the_clue_holds() -> None:
    def holds(fact: str, word: str) -> bool:
        letter, place, mark = fact[0], fact[1:-1], fact[-1]
        if mark == "-":
            return letter not in word
        return (word[int(place) - 1] == letter) == (mark == "!") and letter in word

    wordle, rng = default_wordle(), np.random.default_rng(2)
    for guess, hidden in rng.integers(len(WORDS), size=(20, 2)).tolist():
        facts = wordle.clue_line(guess, hidden).split()
        fits = wordle.fitting(np.ones((1, len(WORDS)), dtype=bool), np.array([guess]), np.array([hidden]))[0]
        assert fits.tolist() == [all(holds(fact, word) for fact in facts) for word in WORDS]
        assert fits[hidden]


def test_a_game_by_hand() -> None:
    wordle = Wordle(["about", "actor", "apple"])
    game = Game(wordle, 0)
    for said in ["apple\n", "appl\n", "", "a p p l e", "about"]:
        assert not game.over
        game.say(said)
    assert (game.over, game.rewards) == (True, [-1, -1, -1, -1, 0])
    assert game.text == "Wordle:\napple\na1! p- p- l- e-\nappl\nnone\n\nnone\na p p l e\nnone\nabout\n"
    lost = Game(wordle, 0)
    for _ in range(TRIES):
        lost.say("actor\n")
    assert (lost.over, lost.score) == (True, -6)
    assert len(lost.turns) == 2 * TRIES and lost.turns[-1] == "actor\n"


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
    # Of three words, "about" tells the other two apart ("... o- u- t-", "... o3? u- t5?"): 0 + 1 + 1 wrong guesses
    # over 3 words.
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
        assert turns[0] == OPENING and len(turns) == 2 * (len(rewards) - 1) and rewards[-1] == 0
    assert task.record(default_wordle(), 5, seed=2).samples == task.record(default_wordle(), 5, seed=2).samples


def test_the_same_words_always_score_as_the_words_do() -> None:
    wordle = default_wordle()
    episodes = [Game(wordle, word) for word in range(len(WORDS))]
    scores = play(lambda texts: ["about" for _ in texts], episodes)
    assert scores.count(0) == 1 and scores.count(-6) == len(WORDS) - 1


def test_a_guess_is_one_token_and_a_clue_is_five(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    task.tokenizer().save_pretrained(tmp_path)
    text = OPENING + "stone\ns- t2? o- n- e5!\nzebra\nnone\nabout\n"
    for tokenizer in (task.tokenizer(), AutoTokenizer.from_pretrained(tmp_path)):
        ids = tokenizer.encode(text)
        assert len(ids) == 1 + 1 + 5 + 1 + 1 + 1
        assert [token for token in ids if token == tokenizer.unk_token_id] == [ids[7]]  # zebra is no word of the list
        assert tokenizer.decode(ids, skip_special_tokens=True) == " ".join(text.replace("zebra", "").split())
    assert all(len(tokenizer.encode(turn)) == 1 for turn in WORDS)
    # 431 words, 26 letters that are not there, 26 at each place as wrong and as right, two lines, four specials.
    assert len(task.tokens()) == len(set(task.tokens())) == 431 + 26 + 2 * 5 * 26 + 2 + 4 == len(tokenizer)


def test_each_reward_is_at_its_guess() -> None:
    """Not at the end of the game, from where the last one would have to be guessed back."""
    from trlx_like.pipelines.dialogues import encode_dialogues

    wordle, tokenizer = default_wordle(), task.tokenizer()
    game = Game(wordle, 0)
    for said in ("actor", "about"):
        game.say(said)
    data = Data([game])
    (dialogue,) = encode_dialogues(data.samples, tokenizer, 38, data.rewards)
    learned = [
        (tokenizer.decode([token]), reward)
        for token, output, reward in zip(dialogue.ids, dialogue.is_output, dialogue.rewards or [], strict=True)
        if output
    ]
    assert learned == [("actor", -1.0), ("about", 0.0), (task.EOS, 0.0)]


def test_the_first_weights_can_spell() -> None:
    """The row of a word is a sum over its letters in their places: fight - right = found - round, which is f1 - r1."""
    import torch

    lm = task.model()
    assert lm.config.vocab_size == len(task.tokens())
    assert lm.config.max_position_embeddings > 1 + TRIES + (TRIES - 1) * LETTERS + 1
    fight, right, found, around = (WORDS.index(word) for word in ("fight", "right", "found", "round"))
    for rows in (lm.model.embed_tokens.weight, lm.lm_head.weight):
        torch.testing.assert_close(rows[fight] - rows[right], rows[found] - rows[around])
        assert (rows[fight] - rows[right]).norm() > 0.1


def test_the_data_needs_no_torch() -> None:
    code = "import sys; from examples.wordle.task import *; record(Wordle(), 9); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True)


def test_which_words_fit_is_read_from_the_text_of_a_game() -> None:
    wordle = Wordle(["about", "actor", "apple", "awful"])
    assert fitting(wordle, OPENING).all()
    clue = "apple\na1! p- p- l- e-\n"  # an a in front, and no p, l or e
    assert fitting(wordle, f"{OPENING}{clue}").tolist() == [True, True, False, False]
    assert fitting(wordle, f"{OPENING}{clue}appl\nnone\n\nnone\nactor\na1! c- t3? o4? r-\n").tolist() == [
        *(True, False, False, False)
    ]


def test_the_guesses_that_fit_are_counted_from_the_second() -> None:
    game = Game(Wordle(["about", "actor", "apple", "awful"]), 0)
    for said in ("apple", "actor", "xyz", "awful", "about"):  # "awful" has the l that "apple" ruled out
        game.say(said)
    assert guesses_fit([game]) == [True, False, False, True]


def test_a_perfect_reader_says_only_words_that_fit() -> None:
    """With untrained weights it plays like the player that knows no better than what fits."""
    from types import SimpleNamespace

    import torch

    from trlx_like.models.heads import ILQLHeads

    torch.manual_seed(0)
    lm = task.model()
    trainer = SimpleNamespace(
        model=SimpleNamespace(lm=lm), tokenizer=task.tokenizer(), values=ILQLHeads(128, lm.config.vocab_size, True)
    )
    games = [Game(default_wordle(), hidden) for hidden in range(0, 431, 10)]
    scores = play(perfect_reader(trainer, default_wordle(), beta=4.0, sample=True), games)
    assert all(guesses_fit(games)) and np.mean(scores) > -3


def test_a_player_opens_with_the_most_telling_words() -> None:
    """The word "about" tells the other two apart, so it is said first, and then the one word that is left."""
    wordle = Wordle(["about", "actor", "apple"])
    games = [Game(wordle, hidden) for hidden in range(3)]
    play(opening_with(1, wordle, lambda texts: ["actor" for _ in texts]), games)
    assert [game.turns[1] for game in games] == ["about\n"] * 3
    assert [game.score for game in games] == [0, -1, -6]
    games = [Game(wordle, hidden) for hidden in range(3)]
    assert play(opening_with(2, wordle, lambda texts: ["actor" for _ in texts]), games) == [0, -1, -1]
