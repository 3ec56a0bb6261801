"""A pool of sampled responses with their scores, kept by prompt over the rounds of a run."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class ScoredResponse(NamedTuple):
    """Hold a response with its prompt and score."""

    prompt: list[int]  # token ids
    response: list[int]  # token ids
    text: str  # of the response
    score: float


class ResponsePool:
    """Keep the responses to each prompt in the order in which they were made.

    Responses with the same text count as the same response, of which only the first one's ids are kept. (Other ids for
    the same text are an unusual tokenisation, or differ in special tokens that no reward function sees.)

    Args:
        limit: Number of newest responses to keep per prompt; None: keep all.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._pools: dict[bytes, _Pool] = {}  # by prompt; ids are packed

    def extend(self, responses: Iterable[ScoredResponse]) -> None:
        """Add responses to known or new prompts."""
        for prompt, response, text, score in responses:
            pool = self._pools.setdefault(_pack(prompt), _Pool())
            pool.ids.setdefault(text, _pack(response))
            pool.made.append((text, score))
        if self.limit is not None:
            for pool in self._pools.values():
                del pool.made[: -self.limit]
                pool.ids = {text: pool.ids[text] for text, _ in pool.made}

    def __len__(self) -> int:
        """Count the responses, including repeated ones."""
        return sum(len(pool.made) for pool in self._pools.values())

    def scores(self) -> list[Tensor]:
        """Return the scores of the responses to each prompt, including repeated ones. [n] float64 each"""
        return [torch.tensor([score for _, score in pool.made], dtype=torch.float64) for pool in self._pools.values()]

    def select(self, thresholds: Tensor) -> list[tuple[list[int], list[int]]]:
        """Select the distinct responses that reach their prompt's threshold.

        Args:
            thresholds: One threshold per prompt. [P]

        Returns:
            For each selected response the ids of its prompt and its own ids.
        """
        chosen = []
        for (prompt, pool), threshold in zip(self._pools.items(), thresholds.tolist(), strict=True):
            distinct = dict.fromkeys(text for text, score in pool.made if score >= threshold)
            chosen += [(_unpack(prompt), _unpack(pool.ids[text])) for text in distinct]
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Return the prompts, their distinct responses and the order of all responses, as flat tensors and texts."""
        pools = list(self._pools.values())
        numbers = [{text: number for number, text in enumerate(pool.ids)} for pool in pools]
        made = [number[text] for pool, number in zip(pools, numbers, strict=True) for text, _ in pool.made]
        return {
            "prompts": _flat(self._pools),
            "responses": _flat(ids for pool in pools for ids in pool.ids.values()),
            "texts": [text for pool in pools for text in pool.ids],
            "distinct": torch.tensor([len(pool.ids) for pool in pools], dtype=torch.int64),
            "lengths": torch.tensor([len(pool.made) for pool in pools], dtype=torch.int64),
            "made": torch.tensor(made, dtype=torch.int64),
            "scores": torch.tensor([score for pool in pools for _, score in pool.made], dtype=torch.float64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents by those that were saved."""
        responses, texts = iter(_rows(state["responses"])), iter(state["texts"])
        lengths = state["lengths"].tolist()
        made, scores = state["made"].split(lengths), state["scores"].split(lengths)
        self._pools = {}
        for row, prompt in enumerate(_rows(state["prompts"])):
            pool = self._pools[prompt] = _Pool()
            pool.ids = {next(texts): next(responses) for _ in range(int(state["distinct"][row]))}
            known = list(pool.ids)
            pool.made = [(known[n], score) for n, score in zip(made[row].tolist(), scores[row].tolist(), strict=True)]


class BestResponse(NamedTuple):
    """Hold the best response so far to a prompt."""

    score: float
    response: list[int]  # token ids
    finish_reason: str
    token_rewards: list[float] | None = None  # from the first token on, if the score is their sum


class BestResponses:
    """Remember the best response so far to each row of the data; among equal scores the one that came first."""

    def __init__(self) -> None:
        self._best: dict[int, tuple[float, bytes, str, array[float]]] = {}  # by row; ids are packed

    def get(self, row: int) -> BestResponse | None:
        """Return the best response so far to a row of the data; None if there is none yet."""
        if (best := self._best.get(row)) is None:
            return None
        return BestResponse(best[0], _unpack(best[1]), best[2], best[3].tolist() or None)

    def update(self, found: Iterable[tuple[int, BestResponse]]) -> None:
        """Remember the responses that score above the best so far to their row of the data."""
        for row, (score, response, reason, rewards) in found:
            if row not in self._best or score > self._best[row][0]:
                self._best[row] = score, _pack(response), reason, array("d", rewards or [])

    def state_dict(self) -> dict[str, Any]:
        """Return rows, scores and responses, as flat tensors and texts."""
        best = list(self._best.values())
        rewards = [reward for *_, rewards in best for reward in rewards]
        return {
            "rows": torch.tensor(list(self._best), dtype=torch.int64),
            "scores": torch.tensor([score for score, *_ in best], dtype=torch.float64),
            "responses": _flat(response for _, response, *_ in best),
            "finish_reasons": [reason for _, _, reason, _ in best],
            "token_rewards": torch.tensor(rewards, dtype=torch.float64),
            "rewarded": torch.tensor([len(rewards) for *_, rewards in best], dtype=torch.int64),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents by those that were saved."""
        rewards = [array("d", part.tolist()) for part in state["token_rewards"].split(state["rewarded"].tolist())]
        columns = state["scores"].tolist(), _rows(state["responses"]), state["finish_reasons"], rewards
        self._best = dict(zip(state["rows"].tolist(), zip(*columns, strict=True), strict=True))


@dataclass
class _Pool:
    """The responses to one prompt."""

    ids: dict[str, bytes] = field(default_factory=dict)  # by text, in the order in which the texts were first made
    made: list[tuple[str, float]] = field(default_factory=list)


def _pack(ids: Sequence[int]) -> bytes:
    """Pack ids into four bytes per token; a list of ints takes up to 36."""
    return array("i", ids).tobytes()


def _unpack(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


def _flat(rows: Iterable[bytes]) -> dict[str, Tensor]:
    packed = list(rows)
    return {
        "ids": torch.tensor(np.frombuffer(b"".join(packed), dtype=np.int32)),
        "lengths": torch.tensor([len(row) // 4 for row in packed], dtype=torch.int64),
    }


def _rows(flat: dict[str, Tensor]) -> list[bytes]:
    return [row.numpy().tobytes() for row in flat["ids"].split(flat["lengths"].tolist())]
