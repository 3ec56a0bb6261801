"""Options of supervised fine-tuning."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema

from trlx_like.config.method import TextMethodConfig
from trlx_like.config.problems import Accepts
from trlx_like.config.resume import OfData


def _function(value: Any) -> Any:
    if not (value is None or callable(value) or (isinstance(value, str) and ":" in value)):
        raise ValueError
    return value


class SFTConfig(TextMethodConfig):
    """Fine-tune on given text by next-token prediction (supervised fine-tuning)."""

    packing: OfData[bool] = False
    """Put several samples into one row of `train.seq_length` tokens; each attends only to itself."""
    formatting_func: OfData[
        Annotated[
            Any,
            AfterValidator(_function),
            Accepts("a function, 'module:function' or null"),
            WithJsonSchema({"type": ["string", "null"]}),
        ]
    ] = None
    """Function (or "module:function") that makes the text to train on from a sample; null: samples are texts."""
