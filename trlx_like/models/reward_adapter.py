"""A reward model that shares its base with the policy: a LoRA adapter with a head, in the format of peft.

Only the adapter and the head are loaded; the base, frozen, serves policy and reward model alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trlx_like.errors import ConfigError
from trlx_like.imports import install_hint
from trlx_like.models.reward_model import last_states

HEAD = "score"
"""What decoders' classifiers call their last layer, and so what peft saves it as."""


class RewardAdapter(nn.Module):
    """The head of a reward adapter, and which adapter of `lm` goes with it. `lm` has to have one of its own.

    path: folder or hub name. name: what the adapter is called in `lm`. ConfigError for what does not fit.
    """

    def __init__(self, lm: PreTrainedModel, path: str, name: str) -> None:
        super().__init__()
        self.name = name
        self.policy = _policy_adapters(lm, name)
        weights = _add(lm, path, name)
        self.score = _head(weights, path)
        self.to(lm.device)

    @torch.no_grad()
    def forward(self, lm: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
        """Scores [B, L] of sequences [B, T] at their last real tokens; mask [B, T] (bool)."""
        with self._active(lm):
            scores: Tensor = self.score(last_states(lm, ids, mask).to(self.score.weight.dtype))
        return scores

    @contextmanager
    def _active(self, lm: PreTrainedModel) -> Iterator[None]:
        """`lm` with this adapter in place of the policy's, without dropout. What is trained stays as it was."""
        trained = [(parameter, parameter.requires_grad) for parameter in lm.parameters()]
        was_training = lm.training
        lm.eval()
        lm.set_adapter(self.name)
        try:
            yield
        finally:
            lm.set_adapter(self.policy)
            lm.train(was_training)
            for parameter, was_trained in trained:  # peft switches on what it activates
                parameter.requires_grad_(was_trained)


def _policy_adapters(lm: PreTrainedModel, name: str) -> list[str]:
    known = getattr(lm, "peft_config", {})
    if not known:
        raise ConfigError(
            "A reward adapter shares its base with a policy that leaves it as it is: give the policy an adapter of its "
            "own first, lm.add_adapter(LoraConfig(...))."
        )
    if name in known:
        raise ConfigError(f"adapter_name ({name!r}): the policy has an adapter of that name already.")
    active: list[str] = lm.active_adapters()
    return active


def _add(lm: PreTrainedModel, path: str, name: str) -> dict[str, Tensor]:
    """Adds the adapter, frozen and not active; returns all the weights that it was saved with."""
    try:
        from peft import PeftConfig
        from peft.utils import load_peft_weights, set_peft_model_state_dict
    except ImportError as error:
        raise ConfigError(f"A reward adapter needs peft: {install_hint('peft')}.") from error
    try:
        config, weights = PeftConfig.from_pretrained(path), load_peft_weights(path, device="cpu")
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path!r} cannot be loaded as an adapter: {reason}") from error
    _head(weights, path)
    # The policy has no such modules: the head is kept apart.
    config.modules_to_save, config.task_type, config.inference_mode = None, None, True
    before = {parameter: parameter.requires_grad for parameter in lm.parameters()}
    policy = lm.active_adapters()
    own = {key.removeprefix("base_model.model."): value for key, value in weights.items() if f".{HEAD}." not in key}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # more than one is what is wanted
            lm.add_adapter(config, adapter_name=name)
        fits: Any = set_peft_model_state_dict(lm, own, adapter_name=name)
        if wrong := [*fits.unexpected_keys, *(key for key in fits.missing_keys if f".{name}." in key)]:
            raise ValueError(f"{wrong[0]} does not fit.")
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"{path!r} is no adapter for {type(lm).__name__}: {error}") from error
    lm.set_adapter(policy)
    for parameter in lm.parameters():
        parameter.requires_grad_(before.get(parameter, False))
    return weights


def _head(weights: dict[str, Tensor], path: str) -> nn.Linear:
    found = {key.rpartition(".")[2]: value for key, value in weights.items() if f".{HEAD}." in key}
    if "weight" not in found:
        raise ConfigError(f"{path!r} is an adapter without a head {HEAD!r}; a reward model's has task_type SEQ_CLS.")
    labels, width = found["weight"].shape
    head = nn.Linear(width, labels, bias="bias" in found, dtype=found["weight"].dtype)
    head.load_state_dict(found)
    return head.requires_grad_(False)
