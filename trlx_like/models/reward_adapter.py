"""A reward model that shares its base with the policy: an adapter with a head, in peft's format.

Only the adapter and the head are loaded. The frozen base serves the policy and the reward model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trlx_like.errors import ConfigError, raised_as
from trlx_like.imports import needed
from trlx_like.models.dropout import evaluating
from trlx_like.models.reward_model import states_at_end

HEAD = "score"
"""The name of the last layer in classifiers of decoders, under which peft saves it."""


class RewardAdapter(nn.Module):
    """A reward model on the policy's base: its head, and the name of its adapter in the policy's model.

    Args:
        lm: The policy's model, which must have an adapter of its own. The reward adapter is added to it, frozen.
        path: Folder or hub name of the reward adapter.
        name: The name of the reward adapter in `lm`.
        token: The token for a hub repository that is not public.

    Raises:
        ConfigError: If the adapter does not fit, has no head, or the policy has no adapter of its own.
    """

    def __init__(self, lm: PreTrainedModel, path: str, name: str, token: str | bool | None = None) -> None:
        super().__init__()
        self.name = name
        self.policy = _policy_adapters(lm, name)
        weights = _add(lm, path, name, {} if token is None else {"token": token})
        self.score = _head(weights, path)
        self.to(lm.device)

    @torch.no_grad()
    def forward(self, lm: PreTrainedModel, inputs: Mapping[str, Tensor], mask: Tensor) -> Tensor:
        """Score sequences at their last real tokens, without gradient.

        Args:
            lm: The model that was given to the constructor.
            inputs: Token ids and masks, with padding on either side, as for `run_base`.
            mask: True on real tokens, of the decoder if there is one. [B, T] bool

        Returns:
            The scores, one per label of the head. [B, L]
        """
        with self._active(lm):
            return cast(Tensor, self.score(states_at_end(lm, inputs, mask).to(self.score.weight.dtype)))

    @contextmanager
    def _active(self, lm: PreTrainedModel) -> Iterator[None]:
        """Activate the reward adapter, without dropout, within a block. Everything is restored after it."""
        trained = [(parameter, parameter.requires_grad) for parameter in lm.parameters()]
        lm.set_adapter(self.name)
        try:
            with evaluating(lm):
                yield
        finally:
            lm.set_adapter(self.policy)
            for parameter, was_trained in trained:  # peft makes the weights of an activated adapter trainable
                parameter.requires_grad_(was_trained)


def _policy_adapters(lm: PreTrainedModel, name: str) -> list[str]:
    """Return the policy's active adapters, or raise ConfigError if it has none or the name is taken."""
    known = getattr(lm, "peft_config", {})
    if not known:
        raise ConfigError(
            "A reward adapter shares its base with a policy that leaves it as it is: give the policy an adapter of its "
            "own first, lm.add_adapter(LoraConfig(...))."
        )
    if name in known:
        raise ConfigError(f"adapter_name ({name!r}): the policy has an adapter of that name already.")
    return lm.active_adapters()


def _add(lm: PreTrainedModel, path: str, name: str, where: Mapping[str, Any]) -> dict[str, Tensor]:
    """Add the adapter, frozen and inactive, and return all weights of its file."""
    with needed("A reward adapter needs peft", "peft"):
        from peft import PeftConfig
        from peft.utils import load_peft_weights, set_peft_model_state_dict
    try:
        config, weights = PeftConfig.from_pretrained(path, **where), load_peft_weights(path, device="cpu", **where)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{path!r} cannot be loaded as an adapter: {reason}") from error
    _head(weights, path)
    # The policy's model has no module for the head, so the head is kept apart.
    config.modules_to_save, config.task_type, config.inference_mode = None, None, True
    before = {parameter: parameter.requires_grad for parameter in lm.parameters()}
    policy = lm.active_adapters()
    own = {key.removeprefix("base_model.model."): value for key, value in weights.items() if f".{HEAD}." not in key}
    with raised_as(ConfigError, (ValueError, RuntimeError), f"{path!r} is no adapter for {type(lm).__name__}"):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # a second adapter is intended
            lm.add_adapter(config, adapter_name=name)
        fits: Any = set_peft_model_state_dict(lm, own, adapter_name=name)
        if wrong := [*fits.unexpected_keys, *(key for key in fits.missing_keys if f".{name}." in key)]:
            raise ValueError(f"{wrong[0]} does not fit.")
    lm.set_adapter(policy)
    for parameter in lm.parameters():
        parameter.requires_grad_(before.get(parameter, False))
    return weights


def _head(weights: dict[str, Tensor], path: str) -> nn.Linear:
    """Make the head from the weights of the adapter's file, or raise ConfigError if it has none."""
    found = {key.rpartition(".")[2]: value for key, value in weights.items() if f".{HEAD}." in key}
    if "weight" not in found:
        raise ConfigError(f"{path!r} is an adapter without a head {HEAD!r}; a reward model's has task_type SEQ_CLS.")
    labels, width = found["weight"].shape
    head = nn.Linear(width, labels, bias="bias" in found, dtype=found["weight"].dtype)
    head.load_state_dict(found)
    return head.requires_grad_(False)
