"""TRL's IterativeSFTTrainer: supervised fine-tuning by hand, one optimizer step on each batch that a loop gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trlx_like.data.flat import FlatRows
from trlx_like.errors import ConfigError, DataError
from trlx_like.pipelines.tokens import Dialogue
from trlx_like.trainers.base import Metrics
from trlx_like.trainers.rounds import RoundsByHand
from trlx_like.trainers.sft import SFTExperience, SFTTrainer


class IterativeSFTTrainer(RoundsByHand[SFTExperience], SFTTrainer):
    """Fine-tune on texts or token ids that the caller gives, batch by batch.

    It takes this package's configuration with `method.name: SFTConfig`. `train.epochs` counts the calls of `step`, and
    `train.batch_size` the samples of an optimizer step; a larger batch makes several.
    """

    offline = False
    uses = frozenset({"eval_prompts"})
    needs = ()

    @property
    def passes(self) -> int:
        return 1

    def read_data(self) -> None:
        for name in ("packing", "eval_packing", "formatting_func"):
            if getattr(self.method, name):
                raise ConfigError(f"method.{name}: IterativeSFTTrainer trains on what `step` gets; leave it out.")
        self.dialogues, self.held_out = FlatRows.collect(Dialogue, ()), {}

    def make_experience(self) -> Metrics:
        raise ConfigError(
            "IterativeSFTTrainer has no data of its own: call step, or train(samples=...) with SFTTrainer."
        )

    def step(
        self,
        input_ids: Sequence[Tensor] | None = None,
        attention_mask: Sequence[Tensor] | None = None,
        labels: Sequence[Tensor] | None = None,
        texts: Sequence[str] | None = None,
        texts_labels: Sequence[str] | None = None,
    ) -> Metrics:
        """Train on one batch, given as token ids or as texts. Of a longer sample `train.seq_length` tokens are kept.

        Args:
            input_ids: Token ids [T] of each sample: prompt and output. These and the next two also as lists or arrays.
            attention_mask: 1 at the tokens to read [T]; None: all.
            labels: For each sample [T] the ids to learn, -100 where there is nothing to learn; None: `input_ids`. Of an
                encoder-decoder the output [R].
            texts: The samples as text, in place of the ids.
            texts_labels: The outputs of an encoder-decoder; of other models the texts themselves, as in TRL.

        Returns:
            The metrics of the step, averaged over the steps if the batch makes several.

        Raises:
            DataError: If neither or both forms are given, or lengths do not fit.
            ConfigError: If training is complete.
        """
        if (input_ids is None) == (texts is None):
            raise DataError("step: give input_ids or texts, one of the two.")
        if texts is not None:
            input_ids = [torch.tensor(self.tokenizer(text)["input_ids"]) for text in texts]
            if texts_labels is not None:
                labels = [torch.tensor(self.tokenizer(text)["input_ids"]) for text in texts_labels]
        assert input_ids is not None
        for name, given in (("attention_mask", attention_mask), ("labels", labels)):
            if given is not None and len(given) != len(input_ids):
                raise DataError(f"step: {len(given)} rows of {name} for {len(input_ids)} samples.")
        elements = list(self._elements(input_ids, attention_mask, labels))
        return self.round_of(lambda: self._store(elements))

    def _store(self, elements: list[SFTExperience]) -> Metrics:
        self.push_to_store(elements)
        return {"data/samples": float(len(elements)), "data/tokens": sum(float(e.target.sum()) for e in elements)}

    def _elements(
        self, samples: Sequence[Tensor], masks: Sequence[Tensor] | None, labels: Sequence[Tensor] | None
    ) -> Iterator[SFTExperience]:
        longest = self.config.train.seq_length
        kept = slice(longest) if self.tokenizer.truncation_side == "right" else slice(-longest, None)
        for row, sample in enumerate(samples):
            ids = torch.as_tensor(sample).cpu().reshape(-1)
            real = (
                torch.ones_like(ids).bool() if masks is None else torch.as_tensor(masks[row]).cpu().reshape(-1).bool()
            )
            learned = ids if labels is None else torch.as_tensor(labels[row]).cpu().reshape(-1)
            if self.seq2seq:
                prompt, output = ids[real][kept], learned[learned != -100][kept]
                yield SFTExperience(*_with_mask(prompt), *_with_mask(output), torch.ones_like(output).bool())
                continue
            if not len(ids) == len(real) == len(learned):
                raise DataError(
                    f"step: sample {row} has {len(ids)} ids, {len(real)} entries of its mask and {len(learned)} labels."
                )
            target = (learned != -100)[real][kept][1:]
            if not bool((learned == ids)[(learned != -100) & real].all()):
                raise DataError(f"step: labels[{row}] must be the ids of the sample, or -100.")
            if not bool(target.any()):
                raise DataError(f"step: sample {row} has nothing to learn after its first token.")
            ids = ids[real][kept]
            yield SFTExperience(*_with_mask(ids[:1]), *_with_mask(ids[1:]), target)


def _with_mask(ids: Tensor) -> tuple[Tensor, Tensor]:
    return ids, torch.ones_like(ids).bool()
