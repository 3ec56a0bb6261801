"""Replay of the best responses so far, so that what was found once is not lost again (self-imitation).

Source: Oh et al. 2018, arXiv:1806.05635, who learn from past actions whose return is above the expected one. Here such
a response joins the new ones to its prompt, and is compared with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from trlx_like.data import Completion
from trlx_like.data.pool import BestResponse, BestResponses
from trlx_like.distributed import World
from trlx_like.rewards.outcome import Reward, whole
from trlx_like.samplers.text import TextSamples
from trlx_like.trainers.rollouts import Rollouts, Sample

logger = logging.getLogger(__name__)


Chunk = tuple[TextSamples, list[Reward]]
"""Responses of this process, and the reward of each."""


class Replay:
    """Let the best response so far to a prompt stand in for its last new one, if it scores above all new ones.

    The new ones are those of a group, or without groups all of the round that have the same row of the data. If there
    is only one, it stays. All processes remember the same responses. Those of a round count from the next round on, so
    a run does not depend on how many prompts are sampled at a time, nor on the number of processes.

    Args:
        world: The processes of the run.
        rollouts: The samples of the present round.
        group_size: Number of responses to a prompt, which are on one process; 1: there are no groups.
        decode: Makes texts of responses, as `TextSampler.decode` does.
    """

    def __init__(self, world: World, rollouts: Rollouts, group_size: int, decode: Callable[[Completion], Any]) -> None:
        self.world, self.rollouts, self.group_size, self.decode = world, rollouts, group_size, decode
        self.best = BestResponses()
        self.found: list[tuple[int, int, BestResponse]] = []  # number in the round, row of the data; of this process
        self.warned = False  # that no prompt came twice

    def replayed(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks of a round with earlier responses among them: each at once, without groups all at the end.

        Every process calls it. The chunks are those that are added to the round meanwhile.
        """
        if self.group_size > 1:
            for chunk in chunks:
                yield from self._replayed([chunk], self._scores([chunk]))
            return
        made = list(chunks)
        yield from self._replayed(made, dict(sorted(self.world.gather(list(self._scores(made).items())))))

    def remember(self) -> None:
        """Remember the best responses that all processes have found since the last call. Every process calls it."""
        found = sorted(self.world.gather(self.found), key=lambda entry: entry[0])
        self.best.update((row, response) for _, row, response in found)
        self.found = []

    def _scores(self, chunks: Sequence[Chunk]) -> dict[int, float | None]:
        """Return the scores of samples by their numbers in the round."""
        numbers = (number for samples, _ in chunks for number in samples.numbers)
        return dict(zip(numbers, (whole(reward) for _, rewards in chunks for reward in rewards), strict=True))

    def _row(self, number: int) -> int:
        """Return the row of the data that a sample has, by its number in the round."""
        return self.rollouts.taken[number // self.group_size][1]

    def _replayed(self, chunks: Sequence[Chunk], scores: Mapping[int, float | None]) -> list[Chunk]:
        """Put earlier responses among the samples that were last added to the round.

        Args:
            chunks: The samples of this process.
            scores: Scores by number in the round, in ascending order; without groups those of all processes.
        """
        groups: dict[int, list[int]] = {}
        for number in scores:
            key = number // self.group_size if self.group_size > 1 else self._row(number)
            groups.setdefault(key, []).append(number)
        earlier: dict[int, BestResponse] = {}  # by the number of the response that is replaced
        better: set[int] = set()  # numbers of new responses that are above the best so far
        for numbers in groups.values():
            known = self.best.get(self._row(numbers[0]))
            scored = {number: score for number in numbers if (score := scores[number]) is not None}
            first = max(scored, key=scored.__getitem__, default=None)
            if known is not None and (first is None or scored[first] < known.score):
                if len(numbers) > 1:
                    earlier[numbers[-1]] = known
            elif first is not None and (known is None or scored[first] > known.score):
                better.add(first)
        self._warn_if_alone(groups.values())
        added = iter(self.rollouts.samples[-sum(len(samples) for samples, _ in chunks) :])
        return [self._with(chunk, list(islice(added, len(chunk[0]))), earlier, better) for chunk in chunks]

    def _with(
        self, chunk: Chunk, added: Sequence[Sample], earlier: Mapping[int, BestResponse], better: Set[int]
    ) -> Chunk:
        """Find the responses to remember in a chunk, and return it with earlier ones. added: its statistics."""
        samples, rewards = chunk
        ids, masks, numbers = samples.completion.response, samples.completion.mask, samples.numbers
        for place, number in enumerate(numbers):
            if number in better:
                reward, reason = rewards[place], samples.finish_reasons[place]
                score, of_tokens = whole(reward), reward if isinstance(reward, list) else None
                assert score is not None
                new = BestResponse(score, ids[place][masks[place]].tolist(), reason, of_tokens)
                self.found.append((number, self._row(number), new))
        replaced = {place: earlier[number] for place, number in enumerate(numbers) if number in earlier}
        if not replaced:
            return chunk
        rows = samples.completion.split()
        for place, best in replaced.items():
            response = torch.tensor(best.response, device=ids.device)
            rows[place] = replace(rows[place], response=response, mask=torch.ones_like(response).bool())
            added[place].replaced, added[place].kept = True, False
        completion = Completion.collate(rows)
        prompts, outputs, texts = self.decode(completion)
        reasons = [
            replaced[at].finish_reason if at in replaced else own for at, own in enumerate(samples.finish_reasons)
        ]
        components = {
            name: [None if place in replaced else value for place, value in enumerate(column)]
            for name, column in samples.components.items()
        }
        changed = {"outputs": outputs, "samples": texts, "finish_reasons": reasons, "components": components}
        given: dict[int, Reward] = {place: best.token_rewards or best.score for place, best in replaced.items()}
        scores = [given.get(place, reward) for place, reward in enumerate(rewards)]
        return replace(samples, completion=completion, sampling_logprobs=None, **changed), scores

    def _warn_if_alone(self, groups: Collection[Sequence[int]]) -> None:
        """Warn once if no prompt came twice in a round, so that no earlier response can stand in for a new one."""
        if not self.warned and max(map(len, groups), default=2) < 2:
            self.warned = True
            if self.world.main:
                logger.warning(
                    f"method.replay_best: the {len(groups)} responses of this round are to as many prompts, and the "
                    "only new response to a prompt is not replaced. Make rounds larger, or leave it out."
                )
