"""Implicit language Q-learning (Snell et al. 2022, arXiv:2206.11871): offline reinforcement learning on rewarded text.

Every output token is an action. Q and V are learned from the samples and their rewards by expectile regression
(Kostrikov et al. 2021, arXiv:2110.06169). The language model imitates the samples, and decoding adds beta (min Q - V)
to its logits. Documented in docs/algorithms/ilql.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from trlx_like.config.methods.ilql import ILQLConfig
from trlx_like.data import Completion, padded
from trlx_like.data.columns import ColumnRows
from trlx_like.errors import ConfigError
from trlx_like.functional.q_learning import (
    awac_weights,
    expectile_loss,
    monte_carlo_returns,
    next_action_values,
    polyak,
    q_targets,
    td_loss,
)
from trlx_like.functional.q_values import action_values, action_values_and_conservative_loss
from trlx_like.models.heads import ILQLHeads
from trlx_like.pipelines.dialogues import columns_of, encode_dialogues, first_outputs
from trlx_like.pipelines.returns import RowRewards, SampleReward, check_rewards, standardized
from trlx_like.pipelines.truncation import Truncation
from trlx_like.samplers.engines import Engine
from trlx_like.samplers.guided import GuidedEngine
from trlx_like.trainers.base import LossOutput, Metrics
from trlx_like.trainers.text import TextTrainer


@dataclass
class ILQLExperience(Completion):
    """Hold dialogues with rewards. The first token is the prompt, and all others are the response.

    For an encoder-decoder the prompt is the first turn.
    """

    action: Tensor = padded(value=False)  # [B, R] bool, output tokens: what the model chose
    rewards: Tensor = padded()  # [B, R], of actions; 0 elsewhere

    @property
    def scored(self) -> Tensor:
        """Which response tokens are actions. [B, R] bool"""
        return self.action


class ILQLTrainer(TextTrainer[ILQLExperience]):
    """Train V and Q heads on a language model, which guide its decoding."""

    method_class = ILQLConfig
    experience_class = ILQLExperience
    offline = True
    uses = frozenset({"samples", "rewards", "eval_prompts"})
    needs = ("samples", "rewards")
    heads_kind = "ILQLHeads"
    method: ILQLConfig

    def build(self, tokenizer: Any = None) -> None:
        if self.config.sampler.engine != "transformers":
            raise ConfigError(f"sampler.engine ({self.config.sampler.engine}): ILQL decodes with 'transformers' only.")
        super().build(tokenizer)

    def heads(self, hidden_size: int, vocabulary: int) -> dict[str, nn.Module]:
        return {"ilql": ILQLHeads(hidden_size, vocabulary, self.method.two_qs)}

    @property
    def values(self) -> ILQLHeads:
        """The V head, the Q heads and their target networks."""
        return cast(ILQLHeads, self.model.heads["ilql"])

    def make_engine(self) -> Engine:
        return GuidedEngine(self.model.lm, self.tokenizer, self.model.allowed, heads=self.values)

    def read_data(self) -> None:
        self.elements = self._encoded(self.data["samples"], self.data["rewards"], self.config.train.seq_length)

    def make_experience(
        self,
        samples: Sequence[Any] | None = None,
        rewards: Sequence[Any] | None = None,
        max_length: int | None = None,
    ) -> Metrics:
        """Fill the store with rewarded samples, by default those given to `train`.

        Args:
            samples: Texts or dialogues.
            rewards: For each sample one number, one number per output, or one number per output token.
            max_length: Tokens after which a sample is truncated; None for `train.seq_length`.

        Returns:
            Metrics of the data.
        """
        if samples is not None:
            self.elements = self._encoded(samples, rewards or [], max_length or self.config.train.seq_length)
        self.push_to_store(self.elements, whole=True)
        return {
            "data/samples": float(len(self.elements)),
            "data/actions": self.actions,
            "data/return_mean": float(self.returns.mean()),
            "data/return_std": float(self.returns.std()),
            **self.truncation.metrics(),
        }

    def loss(self, batch: ILQLExperience) -> LossOutput:
        method, heads, action = self.method, self.values, batch.action
        out = self.model(batch, heads=False, states=True)
        values = heads.value(out.states.detach() if method.detach_v else out.states)  # [B, R + 1]
        states, actions = out.states[:, :-1][action], batch.response[action]  # [N, H], [N]
        target_q = action_values(states.detach(), actions, heads.target_q)  # [N]
        next_values, continues = next_action_values(values, action)  # [B, R]
        targets = q_targets(batch.rewards, next_values, method.gamma, continues)[action]  # [N]
        returns = monte_carlo_returns(batch.rewards, action, method.gamma)[action] if method.mc_returns else target_q
        now = values[:, :-1][action]  # [N]
        weights = awac_weights(target_q, now, method.beta, method.awac_clip)
        scored = [
            action_values_and_conservative_loss(
                states.detach() if method.detach_q else states, actions, q, method.cql_temperature
            )
            for q in heads.qs
        ]
        losses = {
            "q_loss": torch.stack([td_loss(q, targets) for q, _ in scored]).sum(dim=0),
            "v_loss": expectile_loss(returns, now, method.tau),
            "cql_loss": torch.stack([conservative for _, conservative in scored]).sum(dim=0),
            "awac_loss": -out.logprobs[action] * weights,
        }
        scales = {"cql_loss": method.cql_scale, "awac_loss": method.awac_scale}
        unit = {"awac_loss": "tokens" if method.awac_per == "token" else "actions"}
        terms = {name: (scales.get(name, 1.0) * loss.sum(), unit.get(name, "actions")) for name, loss in losses.items()}
        metrics = {f"losses/{name}": (loss.detach().sum(), unit.get(name, "actions")) for name, loss in losses.items()}
        watched = {
            "values/mean": now,
            "values/advantage": target_q - now,
            "values/error": (now - returns).square(),
            "qvalues/mean": torch.stack([q for q, _ in scored]).mean(dim=0),
            "qvalues/target_mean": target_q,
            "qvalues/awac_weight": weights,
        }
        metrics |= {name: (value.detach().sum(), "actions") for name, value in watched.items()}
        return LossOutput(terms, metrics)

    def units(self, batch: ILQLExperience) -> dict[str, float]:
        return {"actions": float(batch.action.sum()), "tokens": float(batch.mask.sum())}

    def after_step(self, metrics: Metrics) -> None:
        if self.progress.step % self.method.steps_for_target_q_sync == 0:
            alpha = self.method.alpha
            self.run.backend.write(self.values.followed(), lambda target, online: polyak(online, target, alpha))

    def _encoded(self, samples: Sequence[Any], rewards: Sequence[Any], longest: int) -> Sequence[ILQLExperience]:
        standardize = self.method.standardize_rewards

        def checked() -> list[SampleReward]:
            found = check_rewards(rewards, len(samples))
            return standardized(found) if standardize else found

        given = RowRewards.of(rewards, samples, checked, ["rewards of the rows", standardize])
        dialogues = encode_dialogues(
            samples, self.tokenizer, longest, given, seq2seq=self.seq2seq, template=self.chat_options
        )
        self.truncation = Truncation(dialogues)
        self.actions = float(dialogues.values("is_output").sum())
        self.returns = dialogues.sums("rewards")
        columns = columns_of(dialogues, first_outputs(dialogues) if self.seq2seq else None)
        names = {"action": "is_output", "rewards": "rewards"}
        columns |= {name: columns["response"].beside(dialogues, of) for name, of in names.items()}
        return ColumnRows(ILQLExperience, columns)
