"""Reward models: classifiers of transformers with one label.

A decoder's reward is read at its last real token, which is known from the mask. The classes of transformers look for
the last id that is not the pad id instead, and so miss an EOS if EOS is also the pad token.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from trlx_like.config import ModelConfig
from trlx_like.data import Completion
from trlx_like.errors import ConfigError
from trlx_like.imports import called_by_name, is_python_name
from trlx_like.models.adapters import add_adapter, log_trained, read_adapter
from trlx_like.models.compaction import Compaction
from trlx_like.models.faster import faster
from trlx_like.models.finite import require_finite
from trlx_like.models.formats import check_formats, check_in_memory, load_options, prepare_quantized, require_adapter
from trlx_like.models.last_states import Reading, Run, last_states
from trlx_like.models.layout import run_base, top_from
from trlx_like.models.loading import MODEL, read_model, within_reach
from trlx_like.models.packed_rows import PackedRows
from trlx_like.models.sources import UNTRUSTED, check_place, loadable, shown
from trlx_like.models.top_blocks import freeze_below, tell_frozen_before
from trlx_like.models.trunk import Trunk, make_trunk

CLASSIFIER = "ForSequenceClassification"
HEADS = ("score.", "classifier.", "pooler.")
"""Parts that a language model lacks, so that a classifier made from it gets new ones."""


class RewardNetwork(nn.Module):
    """A model that computes one reward per sequence.

    Args:
        lm: A classifier with one label, made of a decoder or an encoder. Its lower blocks are frozen in place.
        num_layers_unfrozen: How many blocks from the top are trained with the head; -1 all, 0 none.
    """

    def __init__(self, lm: PreTrainedModel, num_layers_unfrozen: int = -1) -> None:
        super().__init__()
        tell_frozen_before(lm, num_layers_unfrozen)
        if num_layers_unfrozen == 0:
            lm.base_model.requires_grad_(False)
        elif num_layers_unfrozen > 0:
            freeze_below(lm, top_from(lm, num_layers_unfrozen))
        self.lm = lm
        self.num_layers_unfrozen = num_layers_unfrozen
        self.trunk: Trunk | None = None
        self.compaction: Compaction | None = None  # None: every sequence is read whole, with its padding

    def add_trunk(self) -> str | None:
        """Let `forward` start from kept states, as `LanguagePolicy.add_trunk` does."""
        made = make_trunk(self.lm) if hasattr(self.lm, "score") else "the head of an encoder cannot be read apart"
        self.trunk = None if isinstance(made, str) else made
        return made if isinstance(made, str) else None

    def forward(self, ids: Tensor, mask: Tensor, common: Tensor | None = None, kept: Tensor | None = None) -> Tensor:
        """Compute the rewards of sequences.

        Args:
            ids: Token ids, padded on either side (for encoders on the right). [B, T]
            mask: True on real tokens. [B, T] bool
            common: Number of first tokens that each sequence shares with another one, smaller than its length. They
                may be read once. Sequences then have to be padded on the right. None: nothing is shared. [B] int64
            kept: What `trunk.states` has returned for the sequences; None: all blocks run. [B, T, H]

        Returns:
            The rewards. [B] float32
        """
        score = getattr(self.lm, "score", None)
        if score is None:  # an encoder, which reads the sequence at its first token and pads on the right
            return cast(Tensor, self.lm(input_ids=ids, attention_mask=mask.long()).logits)[:, 0].float()
        states = None if common is None or self.compaction is None else self._compact(ids, mask, common, kept)
        if states is None:
            positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)
            inputs = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions}
            skip = self.compaction is not None and self.compaction.skips_unread
            states = states_at_end(self.lm, inputs, mask, skip, self._run(kept))
        return cast(Tensor, score(states.to(next(score.parameters()).dtype)))[:, 0].float()

    def _run(self, kept: Tensor | None) -> Run:
        """Return what runs the model: all of it, or what is above kept states [N, W, H]."""
        return run_base if kept is None or self.trunk is None else self.trunk.from_states(kept)

    def _compact(self, ids: Tensor, mask: Tensor, common: Tensor, kept: Tensor | None = None) -> Tensor | None:
        """Compute the states [B, H] at the ends of sequences in the cheapest way; None if that is to read them whole.

        The arguments are those of `forward`.
        """
        assert self.compaction is not None
        batch, source = _split(ids, mask, common)
        compact = self.compaction.of(batch, branches=kept is not None, whole=ids.shape[1])
        if compact is None:
            return None
        last = batch.prompt.shape[1] + batch.mask.sum(dim=1) - 1
        rows = torch.arange(len(last), device=last.device)
        if not isinstance(compact, PackedRows):
            places = compact.ends if self.compaction.skips_unread else None
            hidden = last_states(self.lm, Reading(batch.inputs(), compact, places))
            return hidden[:, -batch.mask.shape[1] :][rows, last - batch.prompt.shape[1]]
        places = compact.places[rows, last]
        if kept is not None:
            kept = compact.pack(kept[torch.arange(len(last), device=last.device)[:, None], source])
        reading = Reading(compact.inputs, places=places if self.compaction.skips_unread else None)
        return last_states(self.lm, reading, self._run(kept)).flatten(0, 1)[places]


def _split(ids: Tensor, mask: Tensor, start: Tensor) -> tuple[Completion, Tensor]:
    """Split sequences [B, T] that are padded on the right into prompts of so many tokens [B] and responses.

    Returns:
        The prompts and responses, and the place of each of their tokens in its sequence, where it is real.
        [B, P + R] int64
    """
    lengths = mask.sum(dim=1)
    width, longest = torch.stack([start.max().clamp(min=1), (lengths - start).max()]).tolist()
    place = torch.arange(width + longest, device=ids.device) - width + start[:, None]  # [B, P + R]
    source = place.clamp(0, ids.shape[1] - 1)
    parts = ids.gather(1, source), (place >= 0) & (place < lengths[:, None])
    (prompt, response), (prompt_mask, response_mask) = (part.tensor_split([width], dim=1) for part in parts)
    return Completion(prompt, prompt_mask, response, response_mask), source


def states_at_end(
    lm: PreTrainedModel, inputs: Mapping[str, Tensor], mask: Tensor, skip_unread: bool = False, run: Run = run_base
) -> Tensor:
    """Compute the last hidden states at the last real token of each sequence; of an encoder-decoder, of the decoder's.

    Args:
        lm: The language model.
        inputs: The arguments of `run_base`.
        mask: True on real tokens, of the decoder if there is one. [B, T] bool
        skip_unread: Whether the last block computes these tokens alone, see `can_skip_unread`.
        run: As for `last_states`.

    Returns:
        The states. [B, H]
    """
    last = torch.where(mask, torch.arange(mask.shape[1], device=mask.device), 0).argmax(dim=1)  # [B]
    places = torch.arange(len(mask), device=mask.device) * mask.shape[1] + last
    return last_states(lm, Reading(inputs, places=places if skip_unread else None), run).flatten(0, 1)[places]


def load_reward_model(
    path: Any,
    *,
    trained: bool = False,
    option: str = MODEL,
    config: ModelConfig | None = None,
    **extra: Any,
) -> Any:
    """Load a classifier with one label, in float32 unless `config` or `extra` says otherwise.

    Args:
        path: A folder or hub name (of a language model too, which gets a new head), a `PretrainedConfig` (random
            weights), a classifier (used as it is), or `module:function` that returns one of these.
        trained: Refuse models without a trained head.
        option: The name of the option in errors.
        config: The section `model` with the number formats of a model that is to be trained; None: of another one.
        extra: Passed to `from_pretrained`.

    Returns:
        The model.

    Raises:
        ConfigError: If it cannot be loaded or trained, or is no reward model.
    """
    path = called_by_name(path, option)
    headers = {"dtype": torch.float32, **UNTRUSTED, **extra}
    if config is not None:
        check_formats(config)
        headers |= load_options(config, path, quantized=False)
        extra = {**load_options(config, path), **extra}
    with _readable(path, option):
        if isinstance(path, str) and Path(path).is_dir():
            # By its headers first, before memory is filled with what turns out to be random.
            _load(path, trained, option, {**headers, "device_map": "meta"})
        model = _load(path, trained, option, {**headers, **extra})
    if not type(model).__name__.endswith(CLASSIFIER) or model.config.num_labels != 1:
        raise ConfigError(
            f"{option}: a reward model is a classifier with one label, such as AutoModelForSequenceClassification "
            f"makes with num_labels=1, not a {type(model).__name__} with {model.config.num_labels}."
        )
    if model.config.is_encoder_decoder:
        raise ConfigError(f"{option}: {type(model).__name__} has an encoder and a decoder; use a model with one.")
    if config is not None:
        check_in_memory(model, config) if isinstance(path, PreTrainedModel) else prepare_quantized(model, config)
        require_adapter(model, config.peft_config is not None)
    require_finite(model, f"{option} ({shown(path)})")
    return faster(model)


def inspect_reward_model(options: ModelConfig) -> PretrainedConfig | None:
    """Check a reward model, or the model that it starts from, by its configuration and the headers of its files.

    Args:
        options: The section `model`.

    Returns:
        The configuration of the model; None if that is not known, because a function makes the model or it is not on
        this machine.

    Raises:
        ConfigError: As `load_reward_model`, for what can be known without the weights.
    """
    path = options.model_path
    extra = {**UNTRUSTED, **load_options(options, path, quantized=False), "local_files_only": True}
    found = within_reach(path, MODEL, extra)
    return load_reward_model(path, **extra, device_map="meta").config if isinstance(found, str) else found


def _load(path: Any, trained: bool, option: str, extra: dict[str, Any]) -> PreTrainedModel:
    """Load the classifier, or make one with random weights."""
    if isinstance(path, PreTrainedModel):
        return path
    if isinstance(path, PretrainedConfig):
        path = copy.deepcopy(path)
        path.num_labels = 1
    else:
        check_place(str(path), option)
        if trained:
            check_reward_model(str(path), option)
        else:
            extra = {"num_labels": 1, **extra}
    return read_model(AutoModelForSequenceClassification, path, option, extra, () if trained else HEADS)


def _readable(path: Any, option: str) -> AbstractContextManager[None]:
    """Raise ConfigError in a `with` block for a path that cannot be loaded."""
    return loadable(path, option, "model.model_extra_configs" if option == MODEL else "", " as a reward model")


def check_reward_model(path: str, option: str) -> None:
    """Raise ConfigError unless a folder or hub name holds a classifier, by its configuration. Loads no weights.

    Args:
        path: The folder or hub name.
        option: The name of the option in errors.
    """
    with _readable(path, option):
        saved = AutoConfig.from_pretrained(path, **UNTRUSTED).architectures or ["a model that does not say its class"]
    if not saved[0].endswith(CLASSIFIER):
        raise ConfigError(f"{option} ({path!r}) holds {saved[0]}, which has no trained head for rewards.")


def add_reward_adapter(lm: PreTrainedModel, given: Any, path: Any) -> None:
    """Add a new adapter to a classifier, so that only it and the head are trained.

    Args:
        lm: The classifier, changed in place.
        given: `model.peft_config`.
        path: `model.model_path`, which is written into the adapter's folder when it is saved.

    Raises:
        ConfigError: See `read_adapter` and `add_adapter`.
    """
    config = read_adapter(given)
    if hasattr(lm, "score"):
        lm.score.float()  # it is trained, and computes in its own format
    config.task_type = "SEQ_CLS"
    config.modules_to_save = [*(config.modules_to_save or []), "score" if hasattr(lm, "score") else "classifier"]
    add_adapter(lm, config, path if isinstance(path, str) and not is_python_name(path) else None)
    log_trained(lm)


def with_own_pad_token(tokenizer: PreTrainedTokenizerBase, lm: PreTrainedModel) -> PreTrainedTokenizerBase:
    """Copy a tokenizer for a reward model: it pads on the right, with a token that never ends a text.

    If EOS is the pad token, BOS takes its place, or a new token for which the embeddings get a row. The pad token is
    also set in the model's configuration, so that an exported reward model computes the same rewards in plain
    transformers.

    Args:
        tokenizer: The tokenizer. It is not changed.
        lm: The reward model, changed in place.

    Returns:
        The new tokenizer.
    """
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        start = tokenizer.bos_token  # never at the end of a text, so never mistaken for padding there
        tokenizer.add_special_tokens({"pad_token": "<|pad|>" if start in (None, tokenizer.eos_token) else start})
    if len(tokenizer) > lm.config.get_text_config().vocab_size:
        lm.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    lm.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    lm.config.pad_token_id = tokenizer.pad_token_id
    return tokenizer
