"""Where responses end: by EOS, and by stop strings over tokens that are parts of letters or begin with a space."""

from __future__ import annotations

import torch
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trlx_like.samplers.stopping import StopStrings, ends

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = ["<eos>", "▁hello", "▁big", "▁world", "?", "lo", "▁", "."]


def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """One token a byte, as GPT-2 has for rare letters; or words with the space before them, as Llama has."""
    if kind == "bytes":
        made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(BYTES)}, []))
        made.decoder = decoders.ByteLevel()
    else:
        made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="?"))
        made.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=None)


KINDS = {kind: tokenizer(kind) for kind in ("bytes", "words")}


def test_ends_golden() -> None:
    # First EOS at the second place; none; at the first, and again after it; another EOS.
    response = torch.tensor([[5, 0, 0, 5], [5, 6, 7, 8], [0, 3, 0, 3], [5, 6, 9, 0]])
    assert ends(response, [0]).tolist() == [2, 4, 1, 4]
    assert ends(response, [0, 9]).tolist() == [2, 4, 1, 3]
    assert ends(response, []).tolist() == [4, 4, 4, 4]


@given(data=st.data(), kind=st.sampled_from(["bytes", "words"]))
def test_a_token_that_completes_a_stop_string_is_found(data: st.DataObject, kind: str) -> None:
    """The first after which the text of the whole response contains one, decoded anew for each token."""
    known = KINDS[kind]
    letters = "aé→ .!" if kind == "bytes" else "helo wr.?big"
    stop = data.draw(st.lists(st.text(letters, min_size=1, max_size=3), min_size=1, max_size=3))
    if kind == "bytes":
        alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False)
        text = data.draw(st.text(letters, min_size=1, max_size=12))
        row = [BYTES.index(letter) for part, _ in alphabet.pre_tokenize_str(text) for letter in part]
    else:
        row = data.draw(st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=6))
    stops = StopStrings(stop, known, 0)
    found = next((n for n in range(1, len(row) + 1) if stops.complete(row[:n])), None)
    texts = [str(known.decode(row[:n])) for n in range(1, len(row) + 1)]
    assert found == next((n for n, text in enumerate(texts, 1) if any(string in text for string in stop)), None)
