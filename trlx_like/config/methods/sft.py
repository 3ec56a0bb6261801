"""Options of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from trlx_like.config.method import Sections, TextMethodConfig
from trlx_like.config.problems import Accepts, Problem, at, only
from trlx_like.config.resume import Applied, OfData

PackingOption = bool | Literal["bins", "blocks"]


class SFTConfig(TextMethodConfig):
    """Fine-tune on given text by next-token prediction (supervised fine-tuning)."""

    packing: OfData[PackingOption] = False
    """Fill rows of `train.seq_length` tokens with samples, each attending to itself only. bins (or true): best fit,
    splitting only samples longer than a row; blocks: in order, splitting the samples at the end of a row."""
    eval_packing: Applied[PackingOption | None] = None
    """The same for held-out samples, so that all of a sample longer than a row is measured; null: as `packing`."""
    neftune_noise_alpha: Applied[float | None] = Field(default=None, gt=0)
    """Strength of uniform noise on the embeddings in training (NEFTune), often 5; null: none."""
    formatting_func: OfData[
        Annotated[
            Any,
            only(lambda value: ":" in value if isinstance(value, str) else value is None or callable(value)),
            Accepts("a function, 'module:function' or null"),
            WithJsonSchema({"type": ["string", "null"]}),
        ]
    ] = None
    """Function (or "module:function") that makes the text to train on from a sample; null: samples are texts."""

    @property
    def held_out_packing(self) -> PackingOption:
        """How held-out samples are packed."""
        return self.packing if self.eval_packing is None else self.eval_packing

    def conflicts_with(self, config: Sections) -> Iterable[Problem]:
        if (self.packing or self.eval_packing) and config.train.seq_length == 1:
            yield at("train.seq_length", "1 leaves a packed row nothing to predict; use at least 2.")
        if self.neftune_noise_alpha is not None and config.model.model_arch_type == "seq2seq":
            yield at("method.neftune_noise_alpha", "is for causal models; set it to null.")
