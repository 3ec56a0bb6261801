"""Models: loading and saving, scoring of sampled text, heads on hidden states, and the frozen reference."""

from trlx_like.models.dropout import disable_dropout, has_dropout
from trlx_like.models.heads import ILQLHeads, ValueHead
from trlx_like.models.layout import hidden_size, keeps_packed_apart, last_hidden_module, vocabulary_size
from trlx_like.models.loading import (
    arch_type,
    check_folder,
    checkpoint_activations,
    inspect_model,
    load_model,
    load_trained_model,
    save_model,
)
from trlx_like.models.merging import has_adapter, merged, mismerged_weights, plain_weights
from trlx_like.models.policy import LanguagePolicy, PolicyOutput
from trlx_like.models.reference import Fingerprint, create_reference_model
from trlx_like.models.saved_heads import HEADS_FILE, read_heads
from trlx_like.models.sources import check_fit, no_progress_bars
from trlx_like.models.tokenizer import load_tokenizer
from trlx_like.models.value_head import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead
from trlx_like.models.wrapper import PreTrainedModelWrapper

__all__ = [
    "HEADS_FILE",
    "Fingerprint",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "ILQLHeads",
    "LanguagePolicy",
    "PolicyOutput",
    "PreTrainedModelWrapper",
    "ValueHead",
    "arch_type",
    "check_fit",
    "check_folder",
    "checkpoint_activations",
    "create_reference_model",
    "disable_dropout",
    "has_adapter",
    "has_dropout",
    "hidden_size",
    "inspect_model",
    "keeps_packed_apart",
    "last_hidden_module",
    "load_model",
    "load_tokenizer",
    "load_trained_model",
    "merged",
    "mismerged_weights",
    "no_progress_bars",
    "plain_weights",
    "read_heads",
    "save_model",
    "vocabulary_size",
]
