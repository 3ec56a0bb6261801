"""Options of supervised fine-tuning."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema

from trlx_like.config.method import TextMethodConfig
from trlx_like.config.problems import Says


def _function(value: Any) -> Any:
    if not (value is None or callable(value) or (isinstance(value, str) and ":" in value)):
        raise ValueError
    return value


class SFTConfig(TextMethodConfig):
    """Next-token prediction on given text."""

    packing: bool = False
    """Put several samples into one row of `train.seq_length` tokens, each attending to itself only."""
    formatting_func: Annotated[
        Any,
        AfterValidator(_function),
        Says("a function, 'module:function' or null"),
        WithJsonSchema({"type": ["string", "null"]}),
    ] = None
    """Function from a sample to the text that is trained on, or "module:function"; null: samples are text."""
