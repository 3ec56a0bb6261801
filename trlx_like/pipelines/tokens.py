"""Text to token ids, once: special tokens are added where the tokenizer's own encoding adds them, and never twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from trlx_like.pipelines.truncation import Lost

T = TypeVar("T")


@dataclass
class Dialogue:
    """Token ids, and which of them are outputs: what the model should have said. The first is never one."""

    ids: list[int]
    is_output: list[bool]
    rewards: list[float] | None = None  # of each token, where they are known
    lost: Lost = field(default=Lost(), compare=False)  # what was cut

    def __len__(self) -> int:
        return len(self.ids)

    def split(self) -> tuple[list[int], list[int]]:
        """The ids before the first output, and those from it on."""
        first = self.is_output.index(True)
        return self.ids[:first], self.ids[first:]


class TextEncoder:
    """Token ids of prompts and of outputs.

    A text that opens a sequence begins with BOS if the tokenizer's own encoding begins with it, and a sequence that
    would be empty holds BOS (or EOS where there is none), so that the first token of an answer has a state to be
    predicted from.

    seq2seq: prompts and outputs are sequences of their own. A prompt gets all special tokens of the tokenizer's own
    encoding (T5 reads an EOS after each text), an output those that open a target (the language, with mBart's kin).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, seq2seq: bool = False) -> None:
        self.tokenizer = tokenizer
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

    def opening(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts that open a sequence; at least one each."""
        rows = []
        for ids in self._bare(texts):
            before = self.before if ids[: len(self.before)] != self.before else []
            after = self.after if ids[max(len(ids) - len(self.after), 0) :] != self.after else []
            rows.append(before + ids + after or [self.start])
        return rows

    def following(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts that continue a sequence, or of outputs for a decoder."""
        before = self.before_output
        return [ids if ids[: len(before)] == before else before + ids for ids in self._bare(texts)]

    def _bare(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:
            return []
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False).input_ids
        return ids

    def cut(self, row: list[T], longest: int, side: str | None = None) -> list[T]:
        """At most `longest` ids, or what goes with them, cut on `side` or else on the tokenizer's truncation side.

        Special tokens around a prompt stay: without them a model meets text that it has never seen begin or end.
        """
        if len(row) <= longest:
            return row
        last = min(len(self.after), longest)
        first = min(len(self.before), longest - last)
        text, room = row[first : len(row) - last], longest - first - last
        right = (side or self.tokenizer.truncation_side) == "right"
        text = text[:room] if right else text[len(text) - room :]
        return row[:first] + text + row[len(row) - last :]

    def cut_prompt(self, prompt: list[int], longest: int, header: int) -> list[int]:
        """At most `longest` ids. The last `header` ones begin an answer and stay: else a model goes on asking."""
        asked, answer = prompt[: len(prompt) - header], prompt[len(prompt) - header :]
        return self.cut(asked, max(longest - header, 0)) + answer[-longest:]


def _around(whole: list[int], text: list[int]) -> tuple[list[int], list[int]]:
    """What stands before and after `text` in `whole`."""
    at = next(at for at in range(len(whole)) if whole[at : at + len(text)] == text)
    return whole[:at], whole[at + len(text) :]
