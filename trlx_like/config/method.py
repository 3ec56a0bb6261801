"""Base classes of the section `method`: its name, and for methods on text the generation options.

A plugin subclasses `MethodConfig`, or `TextMethodConfig` or `OnlineTextMethodConfig` to inherit generation
and its checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import Field, model_validator

from trlx_like.config.generation import experience_problems, forbidding, generation_problems
from trlx_like.config.problems import Problem, at
from trlx_like.config.resume import Applied, OfRollouts, OfRound, OfWeights
from trlx_like.config.section import Section

if TYPE_CHECKING:
    from trlx_like.config.model import ModelConfig
    from trlx_like.config.train import TrainConfig


class Sections(Protocol):
    """The other sections of a configuration, for the checks of a method."""

    model: ModelConfig
    train: TrainConfig


class MethodConfig(Section):
    """Configure the algorithm: the section `method`. `name` chooses the class."""

    arch_types: ClassVar[tuple[str, ...]] = ("causal", "seq2seq")
    """Values of `model.model_arch_type` that the method can train."""

    name: OfWeights[str] = ""
    """Registered name of the method, such as PPOConfig; `trlx-like list methods` shows all."""

    @property
    def measures_kl(self) -> bool:
        """Whether the trainer logs `policy/kl`, which `train.stop_kl` watches. Override it for a trainer that does."""
        return False

    @model_validator(mode="before")
    @classmethod
    def _default_name(cls, values: Any) -> Any:
        default = vars(cls).get("registered_name") or cls.__name__
        return {"name": default, **values} if isinstance(values, dict) else values

    def conflicts_with(self, config: Sections) -> Iterable[Problem]:
        """Yield conflicts between these options and other sections. Override it for a method's own checks."""
        return ()


GEN_KWARGS = {"max_new_tokens": 40, "top_k": 0, "top_p": 1.0, "do_sample": True}
"""Options that draw 40 tokens from the model's own distribution."""


class TextMethodConfig(MethodConfig):
    """Hold the options of a method whose evaluation generates text."""

    generation_options: ClassVar[tuple[str, ...]] = ()
    """Names of options that `gen_kwargs` may have beside those of text generation."""

    gen_kwargs: Applied[dict[str, Any]] = GEN_KWARGS
    """Generation options for evaluation, such as max_new_tokens. A list of values is a sweep: each is evaluated."""

    def conflicts(self) -> Iterator[Problem]:
        yield from generation_problems(self.gen_kwargs, "gen_kwargs", self.generation_options)


class DropoutMethodConfig(MethodConfig):
    """Hold the option of a method that may train without dropout."""

    disable_dropout: Applied[bool] = True
    """Switch dropout off in training."""


class OnlineTextMethodConfig(TextMethodConfig):
    """Hold the options of a method that learns from text it generates itself."""

    exact_sampling: ClassVar[bool] = True
    """Whether the loss needs the distribution that was sampled from. Imitation (RFT) does not."""

    gen_kwargs: OfRollouts[dict[str, Any]] = GEN_KWARGS
    """Generation options for evaluation, such as max_new_tokens. A list of values is a sweep: each is evaluated."""
    gen_experience_kwargs: OfRollouts[dict[str, Any] | None] = None
    """Generation options for rollouts, the text that is trained on; null: the same as `gen_kwargs`."""

    @property
    def group_size(self) -> int:
        """Number of responses to a prompt, which follow each other in a round."""
        return 1

    def conflicts(self) -> Iterator[Problem]:
        yield from super().conflicts()
        if self.gen_experience_kwargs is not None:
            yield from generation_problems(self.gen_experience_kwargs, "gen_experience_kwargs", self.generation_options)
        yield from experience_problems(self.gen_kwargs, self.gen_experience_kwargs, self.exact_sampling)

    def fewer_than_a_step(self, option: str, config: Sections) -> Iterator[Problem]:
        """Yield the problem of an option that counts the samples of a round if these do not suffice for a step."""
        count, size = getattr(self, option), config.train.batch_size
        if count is not None and count < size:
            words = f"{count} is less than a step's train.batch_size ({size}); use at least that many, or null."
            yield at(f"method.{option}", words)

    @property
    def experience_kwargs(self) -> dict[str, Any]:
        """Return a copy of the options that rollouts are generated with."""
        return dict(self.gen_kwargs if self.gen_experience_kwargs is None else self.gen_experience_kwargs)


class ReplayMethodConfig(OnlineTextMethodConfig):
    """Hold the option of a method that compares the responses to a prompt, within a group or by a value function."""

    replay_best: OfRound[bool] = False
    """Let the best response so far to a prompt stand in for its last new one, if it scores above all new ones."""

    def conflicts(self) -> Iterator[Problem]:
        yield from super().conflicts()
        if not self.replay_best:
            return
        for option in forbidding(self.experience_kwargs):
            yield at(
                "method.replay_best",
                f"a response of an earlier policy may have tokens that {option} forbids by now; leave {option} out of "
                "the options of rollouts.",
            )


class PolicyGradientMethodConfig(ReplayMethodConfig):
    """Hold the options of a method whose loss weights the log-probabilities of sampled tokens by advantages."""

    rollout_correction: Applied[Literal["none", "token", "sequence"]] = "none"
    """Weight the policy loss by the learner's over the sampling engine's probability, of each token or sequence."""
    rollout_correction_cap: Applied[float] = Field(default=2.0, ge=1)
    """Largest weight of `rollout_correction`; larger ones are cut to it (truncated importance sampling)."""

    def conflicts(self) -> Iterator[Problem]:
        yield from super().conflicts()
        if self.replay_best and self.rollout_correction != "none":
            words = "method.rollout_correction cannot correct a response of an earlier policy; set one of the two only."
            yield at("method.replay_best", words)

    def acting(self) -> dict[str, bool]:
        return {**super().acting(), "rollout_correction_cap": self.rollout_correction != "none"}
