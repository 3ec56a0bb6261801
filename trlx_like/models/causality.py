"""Tells whether a language model is causal: whether its logits depend on earlier tokens alone, and not on padding."""

from __future__ import annotations

import logging

import torch
from transformers import PreTrainedModel

from trlx_like.errors import ConfigError
from trlx_like.models.dropout import evaluating
from trlx_like.models.layout import takes

logger = logging.getLogger(__name__)

TOKENS = 4
"""Length of the two texts that are compared. They differ in their last token."""
PADDING = 3
"""How many tokens of padding there are in front of a text that is compared with the same text without them."""
LARGE = 0.02
"""The relative change of logits that rounding in 16 bits does not explain."""


@torch.no_grad()
def require_causal(lm: PreTrainedModel, option: str) -> None:
    """Check that a later token does not change the logits at earlier positions.

    transformers loads masked language models such as BERT as causal ones. These see the token that they are trained to
    predict, so that the loss falls and the model learns nothing.

    Args:
        lm: A model of the kind causal, which is not changed.
        option: The option and path that it comes from, for the error.

    Raises:
        ConfigError: If a later token changes an earlier logit.
    """
    vocabulary = lm.config.get_text_config().vocab_size
    ids = torch.arange(TOKENS, device=lm.device)[None] % vocabulary  # [1, T]
    other = ids.clone()
    other[0, -1] = vocabulary - 1 if vocabulary - 1 != int(ids[0, -1]) else 0
    given = {"attention_mask": torch.ones_like(ids), "use_cache": False}  # without a mask families warn
    with evaluating(lm):
        first, second = (lm(input_ids=text, **given).logits[0, :-1].float() for text in (ids, other))
    difference, largest = float((first - second).abs().max()), float(first.abs().max())
    if difference > 16 * torch.finfo(lm.dtype).eps * largest:
        raise ConfigError(
            f"{option}: {type(lm).__name__} is not causal: another last token changes the logits before it by "
            f"{difference:.2g}. It would see the tokens that it learns to predict; use a causal language model."
        )


@torch.no_grad()
def warn_of_padding(lm: PreTrainedModel, option: str) -> None:
    """Warn if padding in front of a text changes its logits, since texts of a batch are padded to one length.

    Some families read padding into their state (RWKV, RecurrentGemma), or count it as positions (decoders of BART).

    Args:
        lm: A model of the kind causal, which is not changed.
        option: The option and path that it comes from, for the warning.
    """
    ids = torch.arange(TOKENS + PADDING, device=lm.device)[None] % lm.config.get_text_config().vocab_size  # [1, T]
    mask = torch.ones_like(ids)
    mask[:, :PADDING] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    takes_positions = takes(lm, "position_ids")

    def logits(start: int) -> torch.Tensor:
        """Compute the logits of the text in the columns from `start` on."""
        given = {"position_ids": positions[:, start:]} if takes_positions else {}
        out = lm(input_ids=ids[:, start:], attention_mask=mask[:, start:], use_cache=False, **given)
        return out.logits[:, -TOKENS:].float()  # type: ignore[no-any-return]

    with evaluating(lm):
        alone, padded = logits(PADDING), logits(0)
    difference, size = float((alone - padded).norm()), float(alone.norm())
    if difference > LARGE * size:
        logger.warning(
            f"{option}: {type(lm).__name__} computes other logits for a text with padding in front of it (they change "
            f"by {difference / size:.0%}), so that samples and losses depend on the other texts of their batch. Give "
            "prompts of one length, or use a model of another family."
        )
