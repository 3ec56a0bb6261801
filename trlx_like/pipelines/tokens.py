"""Encoding text as token ids, with special tokens where the tokenizer's own encoding adds them, and never twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, ClassVar, TypeVar

from transformers import PreTrainedTokenizerBase

from trlx_like.data.flat import Flat
from trlx_like.errors import DataError
from trlx_like.pipelines.truncation import Lost

T = TypeVar("T")


@dataclass
class Dialogue(Flat):
    """Hold the token ids of a sample, and mark its outputs, the tokens to learn. The first is never an output."""

    FIELDS: ClassVar[Mapping[str, str]] = {"ids": "token", "is_output": "flag", "rewards": "real", "lost": "count"}

    ids: list[int]
    is_output: list[bool]
    rewards: list[float] | None = None  # one per token, if they are known
    lost: Lost = field(default=Lost(), compare=False)  # tokens that were cut

    def __len__(self) -> int:
        return len(self.ids)

    def split(self) -> tuple[list[int], list[int]]:
        """Return the ids before the first output, and the ids from it on."""
        first = self.is_output.index(True)
        return self.ids[:first], self.ids[first:]


class TextEncoder:
    """Encode prompts and outputs as token ids.

    A text that begins a sequence starts with BOS if the tokenizer's own encoding does. A sequence that would be empty
    holds BOS (or EOS if there is no BOS), so that the first token of an answer can be predicted from something.

    Args:
        tokenizer: The tokenizer of the model.
        seq2seq: Whether prompts and outputs are separate sequences. A prompt then gets all special tokens of the
            tokenizer's own encoding (T5 reads an EOS after each text), and an output those that begin a target (such
            as the language, for mBart).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, seq2seq: bool = False) -> None:
        self.tokenizer = tokenizer
        self.seq2seq = seq2seq
        self._ahead: dict[str, list[int]] = {}
        self.eos: int = tokenizer.eos_token_id
        bos: int | None = tokenizer.bos_token_id
        self.start: int = self.eos if bos is None else bos
        self.before: list[int] = [self.start] if tokenizer("a").input_ids[:1] == [bos] else []
        self.after: list[int] = []
        self.before_output: list[int] = []
        if seq2seq:
            self.before, self.after = _around(tokenizer("a").input_ids, self._bare(["a"])[0])
            target = tokenizer(text_target="a").input_ids
            self.before_output, _ = _around(target, tokenizer(text_target="a", add_special_tokens=False).input_ids)

    def read_ahead(self, texts: Iterable[str]) -> None:
        """Encode texts at once, which a fast tokenizer does in several threads, before they are asked for one by one.

        Args:
            texts: The texts; those of an earlier call are forgotten.
        """
        distinct = list(dict.fromkeys(texts))
        self._ahead = {}
        self._ahead = dict(zip(distinct, self._bare(distinct), strict=True))

    def opening(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts that begin a sequence, as at least one id each."""
        rows = []
        for ids in self._bare(texts):
            before = self.before if ids[: len(self.before)] != self.before else []
            after = self.after if ids[max(len(ids) - len(self.after), 0) :] != self.after else []
            rows.append(before + ids + after or [self.start])
        return rows

    def following(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts that continue a sequence, or the outputs of a decoder."""
        before = self.before_output
        return [ids if ids[: len(before)] == before else before + ids for ids in self._bare(texts)]

    def ended(self, ids: list[int]) -> list[int]:
        """Return ids with EOS at the end, added if it is missing."""
        return ids if ids[-1:] == [self.eos] else [*ids, self.eos]

    def _bare(self, texts: Sequence[str]) -> list[list[int]]:
        rest = [text for text in texts if text not in self._ahead]
        try:
            read = iter(self.tokenizer(rest, add_special_tokens=False).input_ids if rest else ())
        except Exception as error:  # of the library in Rust, as for a character that a vocabulary without UNK lacks
            if len(rest) == 1:
                raise DataError(f"The tokenizer cannot encode the text {rest[0]!r:.80}: {error}") from error
            return [self._bare([text])[0] for text in texts]  # one of them raises
        return [self._ahead[text] if text in self._ahead else next(read) for text in texts]

    def cut(self, row: list[T], longest: int, side: str | None = None, ids: Sequence[int] | None = None) -> list[T]:
        """Cut a row of ids, or of values that belong to ids.

        Special tokens around a prompt are kept, since a model has never seen text without them. Messages have them only
        if the chat template writes them.

        Args:
            row: One entry per token.
            longest: The most entries to keep.
            side: The side to cut on, left or right; None: the tokenizer's truncation side.
            ids: The ids of a row of other values; None: `row` has them.
        """
        if len(row) <= longest:
            return row
        whole = list(row if ids is None else ids)
        last = min(len(self.after), longest) if whole[len(whole) - len(self.after) :] == self.after else 0
        first = min(len(self.before), longest - last) if whole[: len(self.before)] == self.before else 0
        text, room = row[first : len(row) - last], longest - first - last
        right = (side or self.tokenizer.truncation_side) == "right"
        text = text[:room] if right else text[len(text) - room :]
        return row[:first] + text + row[len(row) - last :]

    def cut_prompt(self, prompt: list[int], longest: int, header: int) -> list[int]:
        """Cut a prompt to `longest` ids, but not its last `header` ids, which begin an answer."""
        asked, answer = prompt[: len(prompt) - header], prompt[len(prompt) - header :]
        return self.cut(asked, max(longest - header, 0)) + answer[-longest:]


def _around(whole: list[int], text: list[int]) -> tuple[list[int], list[int]]:
    """Return the ids before and after `text` in `whole`."""
    at = next(at for at in range(len(whole)) if whole[at : at + len(text)] == text)
    return whole[:at], whole[at + len(text) :]


def texts_of(row: Any, *columns: str) -> Iterator[str]:
    """Iterate over the texts that encoding a row asks the tokenizer for: those in its columns, or the row itself."""
    parts = map(row.get, columns) if isinstance(row, Mapping) else row if isinstance(row, list | tuple) else (row,)
    return (part for part in parts if isinstance(part, str))


def common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Count the entries that two sequences have in common at their beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
