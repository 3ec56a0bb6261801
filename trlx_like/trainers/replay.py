"""Replay of the best responses so far, so that what was found once is not lost again (self-imitation).

Source: Oh et al. 2018, arXiv:1806.05635, who learn from past actions whose return is above the expected one. Here such
a response joins the new ones to its prompt, and is compared with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from trlx_like.data import Completion
from trlx_like.data.pool import BestResponse, BestResponses
from trlx_like.distributed import World
from trlx_like.rewards.outcome import Reward, whole
from trlx_like.samplers.text import TextSamples
from trlx_like.trainers.rollouts import Rollouts


class Replay:
    """Let the best response so far to a prompt stand in for its last new one, if it scores above all new ones.

    All processes remember the same responses. Those of a round count from the next round on, so a run does not depend
    on how many prompts are sampled at a time, nor on the number of processes.

    Args:
        world: The processes of the run.
        rollouts: The samples of the present round.
        group_size: Number of responses to a prompt.
        decode: Makes texts of responses, as `TextSampler.decode` does.
    """

    def __init__(self, world: World, rollouts: Rollouts, group_size: int, decode: Callable[[Completion], Any]) -> None:
        self.world, self.rollouts, self.group_size, self.decode = world, rollouts, group_size, decode
        self.best = BestResponses()
        self.found: list[tuple[int, int, BestResponse]] = []  # number in the round, row of the data; of this process

    def stand_in(self, samples: TextSamples, rewards: list[Reward]) -> tuple[TextSamples, list[Reward]]:
        """Return the samples that were last added to the round, and their rewards, with earlier responses among them.

        Args:
            samples: Responses of this process; those to a prompt follow each other.
            rewards: One for each; the sum counts if it is a list.
        """
        response, mask = samples.completion.response, samples.completion.mask
        earlier: dict[int, BestResponse] = {}  # by the place of the response that is replaced
        for start in range(0, len(rewards), self.group_size):
            row = self.rollouts.taken[samples.numbers[start] // self.group_size][1]
            known = self.best.get(row)
            places = range(start, start + self.group_size)
            scores = {place: score for place in places if (score := whole(rewards[place])) is not None}
            first = max(scores, key=scores.__getitem__, default=None)
            if known is not None and (first is None or scores[first] < known.score):
                earlier[places[-1]] = known
            elif first is not None and (known is None or scores[first] > known.score):
                new = BestResponse(scores[first], response[first][mask[first]].tolist(), samples.finish_reasons[first])
                self.found.append((samples.numbers[start], row, new))
        return self._with(samples, rewards, earlier) if earlier else (samples, rewards)

    def remember(self) -> None:
        """Remember the best responses that all processes have found since the last call. Every process calls it."""
        found = sorted(self.world.gather(self.found), key=lambda entry: entry[0])
        self.best.update((row, response) for _, row, response in found)
        self.found = []

    def _with(
        self, samples: TextSamples, rewards: list[Reward], earlier: dict[int, BestResponse]
    ) -> tuple[TextSamples, list[Reward]]:
        rows, added = samples.completion.split(), self.rollouts.samples[-len(samples) :]
        for place, best in earlier.items():
            ids = torch.tensor(best.response, device=rows[place].response.device)
            rows[place] = replace(rows[place], response=ids, mask=torch.ones_like(ids).bool())
            added[place].replaced = True
        completion = Completion.collate(rows)
        prompts, outputs, texts = self.decode(completion)
        reasons = [earlier[at].finish_reason if at in earlier else own for at, own in enumerate(samples.finish_reasons)]
        components = {
            name: [None if place in earlier else value for place, value in enumerate(column)]
            for name, column in samples.components.items()
        }
        changed = {"outputs": outputs, "samples": texts, "finish_reasons": reasons, "components": components}
        scores = [earlier[place].score if place in earlier else reward for place, reward in enumerate(rewards)]
        return replace(samples, completion=completion, sampling_logprobs=None, **changed), scores
