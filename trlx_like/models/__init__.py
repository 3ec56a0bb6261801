"""Models: loading and saving, scoring of sampled text, heads on hidden states, and the frozen reference."""

from trlx_like.models.dropout import disable_dropout as disable_dropout, has_dropout as has_dropout
from trlx_like.models.heads import ILQLHeads as ILQLHeads, ValueHead as ValueHead
from trlx_like.models.layout import (
    hidden_size as hidden_size,
    keeps_packed_apart as keeps_packed_apart,
    last_hidden as last_hidden,
    vocabulary_size as vocabulary_size,
)
from trlx_like.models.loading import (
    arch_type as arch_type,
    check_folder as check_folder,
    checkpoint_activations as checkpoint_activations,
    inspect_model as inspect_model,
    load_model as load_model,
    load_trained_model as load_trained_model,
    save_model as save_model,
)
from trlx_like.models.merging import (
    has_adapter as has_adapter,
    merged as merged,
    mismerged_weights as mismerged_weights,
    plain_weights as plain_weights,
)
from trlx_like.models.policy import LanguagePolicy as LanguagePolicy, PolicyOutput as PolicyOutput
from trlx_like.models.reference import Fingerprint as Fingerprint, create_reference_model as create_reference_model
from trlx_like.models.saved_heads import HEADS_FILE as HEADS_FILE, read_heads as read_heads
from trlx_like.models.sources import check_fit as check_fit, no_progress_bars as no_progress_bars
from trlx_like.models.tokenizer import load_tokenizer as load_tokenizer
from trlx_like.models.unread import lowest_blocks as lowest_blocks
from trlx_like.models.value_head import (
    AutoModelForCausalLMWithValueHead as AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead as AutoModelForSeq2SeqLMWithValueHead,
)
from trlx_like.models.wrapper import PreTrainedModelWrapper as PreTrainedModelWrapper
