"""What the outputs of a round have in common: how often they are the same, and whether the reward goes by length."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trlx_like.samplers.text import TextSamples

FEWEST_PROMPTS = 4
"""With fewer of them in a round, that an output is common says little: each prompt has its own."""


@dataclass(frozen=True)
class Output:
    """One output, without its text: processes send each other these."""

    prompt: str
    text: str
    length: int  # in tokens
    reward: float | None


def outputs_of(samples: TextSamples, rewards: Sequence[float | None]) -> list[Output]:
    lengths = samples.completion.mask.sum(dim=1).tolist()
    rows = zip(map(_name, samples.prompts), map(_name, samples.outputs), lengths, rewards, strict=True)
    return [Output(*row) for row in rows]


def _name(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def output_metrics(outputs: Sequence[Output]) -> dict[str, float]:
    """Of the outputs of all processes.

    Without the share of the commonest for fewer than `FEWEST_PROMPTS` prompts, and without the correlation where all
    lengths or all rewards are the same.
    """
    texts = Counter(output.text for output in outputs)
    metrics = {"rollout/duplicate_fraction": 1 - len(texts) / len(outputs)}
    if len({output.prompt for output in outputs}) >= FEWEST_PROMPTS:
        metrics["rollout/top_output_fraction"] = max(texts.values()) / len(outputs)
    scored = [(output.length, output.reward) for output in outputs if output.reward is not None]
    table = torch.tensor(scored, dtype=torch.float64).T.reshape(2, -1)  # lengths, rewards
    if table.shape[1] > 1 and bool((table.amax(dim=1) > table.amin(dim=1)).all()):
        metrics["rollout/length_reward_correlation"] = float(torch.corrcoef(table)[0, 1])
    return metrics
