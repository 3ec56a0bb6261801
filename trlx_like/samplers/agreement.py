"""Checks that samples come from the policy that learns from them, for text and for images.

Before a round of text is scored, the engine's weights and its log-probabilities are compared with the learner's (the
canary). On the first step on fresh experience, of text or images, the probability ratio of learner to sampler has to
be 1 up to rounding. If not, a SamplerError is raised before anything is learned from the samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from trlx_like.data import Sampled
from trlx_like.distributed import World
from trlx_like.errors import NonFiniteError, SamplerError
from trlx_like.functional.policy_gradient import probability_ratio
from trlx_like.models.policy import LanguagePolicy
from trlx_like.samplers.canary import TOLERANCE, Canary, some_of
from trlx_like.samplers.engines import Engine
from trlx_like.samplers.text import TextSamples

T = TypeVar("T")

MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Agreement:
    """Refuse to learn from samples that were not drawn from the policy that is trained.

    Args:
        world: The processes of the run; all of them refuse if one finds a disagreement.
        engine: `sampler.engine`, for the message.
        mixed_precision: `backend.mixed_precision`, which decides how much rounding is allowed.
    """

    def __init__(self, world: World, engine: str, mixed_precision: str) -> None:
        self.world = world
        self.engine = engine
        self.mixed_precision = mixed_precision
        self.canary = Canary()

    def tolerance(self, model: nn.Module, sampler: torch.dtype | None = None) -> float:
        """Return how far the mean ratio may be from 1, by the coarsest number format that takes part."""
        # Weights of 4 bits are stored as uint8, and computed with in the format of the other weights.
        formats = {parameter.dtype for parameter in model.parameters()} - {torch.uint8}
        formats |= {dtype for dtype in (MIXED.get(self.mixed_precision), sampler) if dtype is not None}
        return max(TOLERANCE.get(dtype, 0.1) for dtype in formats - {torch.float64} | {torch.float32})

    @torch.no_grad()
    def check_round(
        self,
        engine: Engine,
        policy: LanguagePolicy,
        samples: TextSamples | None,
        *,
        temperature: float,
        round_: int,
        version: int,
    ) -> None:
        """Compare an engine with the policy on what it has just sampled. Every process calls it.

        Args:
            engine: The engine that generated the samples.
            policy: The policy that will learn from them.
            samples: The first chunk of the round; None if this process has no samples of it.
            temperature: The temperature at which the tokens were drawn.
            round_: Number of the round, for the message.
            version: The version that the engine has to have.

        Raises:
            SamplerError: on all processes, if weights or version differ on one, or if the ratio is too far from 1 on
                average.
        """
        fault = self.canary.weights(policy.lm, engine) or _stale(samples, version)
        apart, tokens = (0.0, 0)
        if samples is not None:
            few = some_of(samples.completion, samples.sampling_logprobs)
            with self.world.accelerator.autocast():  # around the learner alone: it would round merged adapters
                apart, tokens = _distance(policy, few, temperature)
        seen = self.world.gather([(fault, apart, tokens)])
        for rank, (found, *_) in enumerate(seen):
            if found is not None:
                where = f" on process {rank}" if self.world.size > 1 else ""
                self._refuse(f"does not hold the weights that are trained{where}: {found}", round_)
        known = "although their weights are the same"
        if not hasattr(engine, "digests"):
            known = "and it cannot tell whether its weights are right"
        deviation = sum(apart for _, apart, _ in seen) / max(1, sum(tokens for *_, tokens in seen))
        if not deviation <= (limit := self.tolerance(policy.lm, engine.dtype)):  # NaN is not
            self._refuse(
                "and the learner disagree about what was sampled: the ratio of a token's probabilities is "
                f"{deviation:.2g} from 1 on average, above {limit:g}, {known}",
                round_,
            )

    def check_step(self, deviation: float, model: nn.Module) -> None:
        """Check the first step on fresh experience, before it is made.

        Args:
            deviation: Mean distance of the probability ratio from 1, over the global batch.
            model: The model that is trained.

        Raises:
            SamplerError: if the deviation is more than rounding explains.
        """
        limit = self.tolerance(model)
        if not deviation <= limit:  # NaN is not
            raise SamplerError(
                f"policy/ratio_deviation is {deviation:.2g} on fresh experience, above {limit:g}: the loss computes "
                "other log-probabilities than those that the samples were recorded with (dropout, another "
                "temperature, a model that changes between two forwards, batches of another size in coarse numbers). "
                "No step was made on this experience; see docs/audit.md."
            )

    def _refuse(self, what: str, round_: int) -> None:
        advice = "Something has changed the model between sampling and scoring"
        if self.engine != "transformers":
            advice = "With sampler.engine: transformers the trained model itself generates"
        raise SamplerError(
            f"sampler.engine ({self.engine}) {what}. Nothing of round {round_} was learned from. "
            f"{advice}; see docs/audit.md."
        )


def sampled_together(world: World, action: Callable[[], T]) -> T:
    """Call a function that uses an engine on every process, and raise on all of them if sampling fails on one.

    Args:
        world: The processes of the run.
        action: Uses an engine on this process alone.

    Returns:
        What the function returns.
    """
    return world.together(action, SamplerError, NonFiniteError)


def _stale(samples: TextSamples | None, version: int) -> str | None:
    """Describe completions of other versions than the present one; None if there are none."""
    if samples is None or samples.version is None:
        return None
    if not (others := [held for held in samples.version.tolist() if held != version]):
        return None
    return (
        f"{len(others)} of {len(samples)} completions were sampled with version {others[0]} of the weights and the "
        f"present one is {version}: an update was missed"
    )


def _distance(policy: LanguagePolicy, few: Sampled, temperature: float) -> tuple[float, int]:
    """Sum |ratio - 1| over tokens, and count the tokens. RFT may sample in ways that its loss need not model."""
    if few.sampling_logprobs is None:
        return 0.0, 0
    # The loss may score at another temperature than the one that tokens were drawn at, as RFT's does.
    own, policy.temperature = policy.temperature, temperature
    try:
        learner = policy(few, heads=False).logprobs
    finally:
        policy.temperature = own
    ratio = probability_ratio(learner, few.sampling_logprobs)
    return float((ratio - 1).abs()[few.mask].sum()), int(few.mask.sum())
