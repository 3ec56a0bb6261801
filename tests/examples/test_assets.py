"""The examples' assets, offline: llama2.c conversion against a numpy forward, the cache, the hashes, TF-IDF.

Downloads run for real, from a registry that is a folder (`file://`).
"""

from __future__ import annotations

import base64
import hashlib
import io
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import assets, llama2c, sentiment_rewards
from examples.llama2c import FIXED, Llama2c
from examples.sentiment_rewards import TfidfClassifier
from trlx_like.errors import DataError

WIDTH, HIDDEN, LAYERS, HEADS, KEY_HEADS, POSITIONS = 16, 24, 2, 4, 2, 12
HEAD_WIDTH = WIDTH // HEADS
PIECES = [" ", "a", "b", "c", "d", "ab", " ab", "cd", "abcd", " c"]  # ids 259 ... 268, scores 0, -1, ..., -9
VOCABULARY = FIXED + len(PIECES)
SHAPES = {
    "embedding": (VOCABULARY, WIDTH),
    "attention_norm": (LAYERS, WIDTH),
    "q": (LAYERS, WIDTH, WIDTH),
    "k": (LAYERS, KEY_HEADS * HEAD_WIDTH, WIDTH),
    "v": (LAYERS, KEY_HEADS * HEAD_WIDTH, WIDTH),
    "o": (LAYERS, WIDTH, WIDTH),
    "mlp_norm": (LAYERS, WIDTH),
    "gate": (LAYERS, HIDDEN, WIDTH),
    "down": (LAYERS, WIDTH, HIDDEN),
    "up": (LAYERS, HIDDEN, WIDTH),
    "norm": (WIDTH,),
    "rotary_tables": (POSITIONS, HEAD_WIDTH),
    "head": (VOCABULARY, WIDTH),
}
Weights = dict[str, np.ndarray]


def random_weights(seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in SHAPES.items()}


def as_bytes(weights: Weights, tied: bool) -> bytes:
    """What llama2.c writes: model.bin, then tokenizer.bin."""
    vocabulary = VOCABULARY if tied else -VOCABULARY
    header = struct.pack("<7i", WIDTH, HIDDEN, LAYERS, HEADS, KEY_HEADS, vocabulary, POSITIONS)
    arrays = [array.tobytes() for name, array in weights.items() if not (tied and name == "head")]
    fixed = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(bytes([byte]) for byte in range(256))]
    pieces = [(0.0, piece) for piece in fixed]
    pieces += [(-float(rank), piece.encode()) for rank, piece in enumerate(PIECES)]
    table = b"".join(struct.pack("<fi", score, len(piece)) + piece for score, piece in pieces)
    return b"".join([header, *arrays, struct.pack("<i", 5), table])


def reference_logits(weights: Weights, ids: list[int], head: np.ndarray) -> np.ndarray:
    """[T, V], as llama2.c's run.c computes it: float64, one position after the other, neighbours rotated."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    keys: list[list[np.ndarray]] = [[] for _ in range(LAYERS)]
    values: list[list[np.ndarray]] = [[] for _ in range(LAYERS)]
    logits = []
    for position, token in enumerate(ids):
        x = w["embedding"][token]
        for layer in range(LAYERS):
            h = rms_norm(x, w["attention_norm"][layer])
            q = rotated((w["q"][layer] @ h).reshape(HEADS, HEAD_WIDTH), position)
            keys[layer].append(rotated((w["k"][layer] @ h).reshape(KEY_HEADS, HEAD_WIDTH), position))
            values[layer].append((w["v"][layer] @ h).reshape(KEY_HEADS, HEAD_WIDTH))
            mixed = []
            for i in range(HEADS):
                shared = i * KEY_HEADS // HEADS
                scores = np.array([q[i] @ key[shared] for key in keys[layer]]) / np.sqrt(HEAD_WIDTH)
                attention = np.exp(scores - scores.max())
                attention /= attention.sum()
                mixed.append(sum(a * v[shared] for a, v in zip(attention, values[layer], strict=True)))
            x = x + w["o"][layer] @ np.concatenate(mixed)
            h = rms_norm(x, w["mlp_norm"][layer])
            gate = w["gate"][layer] @ h
            x = x + w["down"][layer] @ (gate / (1 + np.exp(-gate)) * (w["up"][layer] @ h))
        logits.append(head.astype(np.float64) @ rms_norm(x, w["norm"]))
    return np.array(logits)


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = x / np.sqrt((x * x).mean() + 1e-5) * weight
    return scaled


def rotated(heads: np.ndarray, position: int) -> np.ndarray:
    """Each pair (2i, 2i + 1) as a complex number, turned by position * 10000^(-2i / D)."""
    turns = np.exp(1j * position * 10000.0 ** (-np.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH))
    pairs = (heads[:, 0::2] + 1j * heads[:, 1::2]) * turns
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(heads.shape)


@pytest.mark.parametrize("tied", [True, False])
def test_a_converted_checkpoint_computes_what_llama2c_computes(tmp_path: Path, tied: bool) -> None:
    weights = random_weights()
    Llama2c.parse(as_bytes(weights, tied)).save(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = [1, 265, 260, 266, 267, 268]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double().numpy()
    expected = reference_logits(weights, ids, weights["embedding" if tied else "head"])
    np.testing.assert_allclose(logits, expected, atol=1e-5)
    assert model.dtype == torch.float32


def test_the_tokenizer_merges_by_score_and_starts_with_bos(tmp_path: Path) -> None:
    Llama2c.parse(as_bytes(random_weights(), tied=True)).save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    # " abcd": "ab" (score -5) first, then " ab" (-6), then "cd" (-7); "abcd" (-8) would need "ab" without the space.
    assert tokenizer.encode("abcd") == [1, 265, 266]
    assert tokenizer.encode("c ab") == [1, 268, 265]  # " c", " ab"
    assert tokenizer.encode("é") == [1, 259, 3 + 0xC3, 3 + 0xA9]  # " " and two bytes
    assert tokenizer.decode([265, 266]) == "abcd"
    assert tokenizer.decode([1, 259, 3 + 0xC3, 3 + 0xA9, 2], skip_special_tokens=True) == "é"
    assert tokenizer.encode("abcd", add_special_tokens=False) == [265, 266]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.padding_side == "left"


def test_trimming_keeps_trained_tokens_with_the_way_to_them_and_the_function(tmp_path: Path) -> None:
    weights = random_weights()
    # Untrained rows lie along one direction, which outweighs the others in the mean. "abcd" is trained; merging
    # reaches it through "a", "b", "c", "d", "ab" and "cd", untrained as rows but needed. " ", " ab", " c" go.
    weights["embedding"][3:] = 3 * weights["embedding"][2]
    weights["embedding"][FIXED + PIECES.index("abcd")] = random_weights(1)["embedding"][0]
    whole = Llama2c.parse(as_bytes(weights, tied=True))
    trimmed = whole.trained_only()
    assert trimmed.pieces[FIXED:] == ["a", "b", "c", "d", "ab", "cd", "abcd"]
    assert trimmed.pieces[:FIXED] == whole.pieces[:FIXED]
    whole.save(tmp_path / "whole")
    trimmed.save(tmp_path / "trimmed")
    old, new = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("whole", "trimmed"))
    assert new.config.vocab_size == FIXED + 7
    rows = [whole.pieces.index(piece) for piece in trimmed.pieces]
    with torch.no_grad():
        before = old(torch.tensor([[1, 267, 264]])).logits[0][:, rows]  # <s> abcd ab
        after = new(torch.tensor([[1, rows.index(267), rows.index(264)]])).logits[0]
    torch.testing.assert_close(after, before)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An npm registry in a folder with one package, toy 1.0.0, and an empty cache."""
    monkeypatch.setenv("npm_config_registry", (tmp_path / "registry").as_uri())
    monkeypatch.setenv("TRLX_LIKE_CACHE", str(tmp_path / "cache"))
    tarball = tmp_path / "registry" / "toy" / "-" / "toy-1.0.0.tgz"
    tarball.parent.mkdir(parents=True)
    with tarfile.open(tarball, "w:gz") as tar:
        member = tarfile.TarInfo("package/data.bin")
        member.size = 5
        tar.addfile(member, io.BytesIO(b"bytes"))
    return tarball


def package(tarball: Path) -> assets.Package:
    integrity = base64.b64encode(hashlib.sha512(tarball.read_bytes()).digest()).decode()
    return assets.Package("toy", "1.0.0", "package/data.bin", f"sha512-{integrity}", instead="Do without.")


def test_a_second_call_reads_the_cache_and_not_the_network(registry: Path) -> None:
    toy = package(registry)
    first = assets.cached("toy.bin", lambda path: assets.fetch_npm(toy, path))
    registry.unlink()
    second = assets.cached("toy.bin", lambda path: assets.fetch_npm(toy, path))
    assert first == second
    assert second.read_bytes() == b"bytes"
    assert [path.name for path in first.parent.iterdir()] == ["toy.bin"]  # nothing half-made beside it


def test_another_hash_is_refused_and_not_kept(registry: Path, tmp_path: Path) -> None:
    toy = package(registry)
    registry.write_bytes(registry.read_bytes() + b"\0")
    with pytest.raises(DataError, match=r"toy 1\.0\.0 came with the hash sha512-.* should be sha512-"):
        assets.cached("toy.bin", lambda path: assets.fetch_npm(toy, path))
    assert list((tmp_path / "cache" / "assets").iterdir()) == []


def test_without_network_and_cache_the_error_says_what_to_pass(registry: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"llama2\.c-emscripten 0\.1\.0 cannot be fetched .* --model PATH"):
        assets.stories8m()
    assert list((tmp_path / "cache" / "assets").iterdir()) == []


def test_stories_are_converted_once_from_the_checkpoint_in_the_cache(registry: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "assets"
    folder.mkdir(parents=True)
    (folder / "llama2.data").write_bytes(as_bytes(random_weights(), tied=True))
    whole, trimmed = assets.stories15m(), assets.stories8m()
    assert AutoModelForCausalLM.from_pretrained(whole).config.vocab_size == VOCABULARY
    assert len(AutoTokenizer.from_pretrained(trimmed)) <= VOCABULARY
    (folder / "llama2.data").unlink()
    assert assets.stories8m() == trimmed
    assert sorted(path.name for path in folder.iterdir()) == ["stories15M", "stories8M"]


def test_tfidf_predicts_the_same_after_save_and_load_and_as_scikit_learn(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    good, bad = ["a good good film", "good fun, good cast", "so much fun"], ["a bad film", "bad, bad cast", "so dull"]
    texts, labels = good * 3 + bad * 3, [1] * 9 + [0] * 9
    unseen = ["Good fun", "A BAD film with a good cast", "bad bad bad good", "nothing known", ""]
    classifier = TfidfClassifier.fit(texts, labels, min_texts=2)
    classifier.save(tmp_path / "tfidf")
    loaded = TfidfClassifier.load(tmp_path / "tfidf")
    assert loaded.scores(unseen) == classifier.scores(unseen)
    assert {path.suffix for path in (tmp_path / "tfidf").iterdir()} == {".json", ".npz"}

    vectorizer = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    regression = LogisticRegression(C=10, solver="liblinear").fit(vectorizer.fit_transform(texts), labels)
    positive = regression.predict_proba(vectorizer.transform(unseen))[:, 1]
    np.testing.assert_allclose(loaded.scores(unseen), 2 * positive - 1, atol=1e-9)
    assert loaded.scores(["good fun"])[0] > 0.3 > -0.3 > loaded.scores(["bad cast"])[0]


def test_sadder_is_minus_vader() -> None:
    pytest.importorskip("vaderSentiment")
    outputs = ["She was happy and loved the puppy.", "He cried, sad and hurt.", "The box was on the table."]
    happy, sad, neutral = sentiment_rewards.vader_reward(outputs, samples=outputs, prompts=[""] * 3)
    assert happy > 0.5 > 0 == neutral > -0.5 > sad
    assert sentiment_rewards.sadder(outputs=outputs, tokenizer=None) == [-happy, -sad, -neutral]


def test_story_prompts_are_distinct_neutral_and_held_out() -> None:
    pytest.importorskip("vaderSentiment")
    folder = Path(llama2c.__file__).parent
    train, held_out = (
        (folder / name).read_text(encoding="utf-8").splitlines()
        for name in ("story_prompts.txt", "story_eval_prompts.txt")
    )
    assert (len(train), len(held_out), len({*train, *held_out})) == (64, 16, 80)
    assert set(sentiment_rewards.vader_reward([*train, *held_out])) == {0.0}
