"""Tells whether a language model is causal: whether its logits depend on earlier tokens alone."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from trlx_like.errors import ConfigError
from trlx_like.models.dropout import evaluating

TOKENS = 4
"""Length of the two texts that are compared. They differ in their last token."""


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
