"""Finds the parts of a Hugging Face language model by structure, without a table of model families.

Of an encoder-decoder, the base model and its blocks are those of the decoder; besides its own tokens it reads the
encoder's last hidden states.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from trlx_like.errors import ConfigError
from trlx_like.models.attention import piece_by_piece
from trlx_like.models.dropout import evaluating

Head = Callable[[Tensor], Tensor]
"""A function from hidden states [N, H] to logits [N, V]."""
_arguments = cache(lambda function: frozenset(inspect.signature(function).parameters))


def base_model(lm: PreTrainedModel) -> nn.Module:
    """Return the part of a language model that computes last hidden states (after the final norm) from token ids.

    Args:
        lm: The language model.

    Returns:
        The model without its head; of an encoder-decoder, the decoder.

    Raises:
        ConfigError: If the model has no head.
    """
    base: nn.Module = lm.get_decoder() if is_encoder_decoder(lm) else lm.base_model
    if base is not lm:
        return base
    # Llama4ForCausalLM names a part that it does not have, and so returns itself.
    parts = [part for part in lm.children() if isinstance(part, PreTrainedModel)]
    if len(parts) != 1:
        raise _headless(lm)
    return parts[0]


def check_has_lm_head(lm: PreTrainedModel) -> None:
    """Raise ConfigError unless a model has a language model head, which computes logits of tokens."""
    base_model(lm)
    if lm.get_output_embeddings() is None:
        raise _headless(lm)


def _headless(lm: PreTrainedModel) -> ConfigError:
    """Make the error for a model without a language model head."""
    return ConfigError(f"model.model_path: {type(lm).__name__} is not a language model with a head.")


def takes(lm: nn.Module, argument: str) -> bool:
    """Return whether the forward pass of a model takes an argument of this name."""
    own = vars(lm).get("forward")  # of this model alone, and not kept when the model is gone
    return argument in (_arguments(type(lm).forward) if own is None else inspect.signature(own).parameters)


def is_encoder_decoder(lm: PreTrainedModel) -> bool:
    """Return True for an encoder-decoder, False for a causal model."""
    return bool(lm.config.is_encoder_decoder)


def decoder_start(lm: PreTrainedModel) -> int | None:
    """Return the token that the decoder of an encoder-decoder starts with; None for a causal model.

    Raises:
        ConfigError: If the configuration of an encoder-decoder does not name the token.
    """
    if not is_encoder_decoder(lm):
        return None
    for config in (lm.generation_config, lm.config):
        start: int | None = getattr(config, "decoder_start_token_id", None)
        if start is not None:
            return start
    raise ConfigError(
        "model.model_path: the model does not say which token its decoder begins with; set decoder_start_token_id in "
        "its configuration."
    )


def hidden_size(lm: PreTrainedModel) -> int:
    """Return the width of the last hidden states, H.

    It may differ from `config.hidden_size`: OPT-350m, for one, projects the last state to a smaller width.
    """
    return embedding_width(lm.get_output_embeddings())


def vocabulary_size(lm: PreTrainedModel) -> int:
    """Return the number of logits of the language model head, V, which may exceed the size of the tokenizer."""
    return cast(Tensor, lm.get_output_embeddings().weight).shape[0]


@contextmanager
def last_hidden(lm: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Yield a list that holds the `last_hidden_state` of the newest forward pass, which the head turns into logits."""
    newest: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        newest[:] = [output.last_hidden_state]

    decoder: nn.Module = lm.get_decoder()
    with (base_model(lm) if decoder is lm else decoder).register_forward_hook(keep):
        yield newest


def blocks(lm: PreTrainedModel) -> nn.ModuleList:
    """Return the list of transformer blocks, bottom first; of an encoder-decoder, those of the decoder.

    Raises:
        ConfigError: If no list of as many blocks as the configuration says is found.
    """
    base = base_model(lm)
    config = base.config if is_encoder_decoder(lm) else lm.config.get_text_config()
    names = ("num_decoder_layers", "decoder_layers", "num_hidden_layers")
    return find_blocks(base, next(getattr(config, name) for name in names if hasattr(config, name)))


def top_from(lm: PreTrainedModel, count: int) -> int:
    """Return the number of the lowest of the top `count` blocks; 0 if there are fewer."""
    return max(0, len(blocks(lm)) - count)


def find_blocks(base: nn.Module, count: int) -> nn.ModuleList:
    """Find the module list with `count` entries."""
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ConfigError(
        f"model.model_path: no list of {count} blocks was found in {type(base).__name__}; "
        "use model.num_layers_unfrozen: -1 with this family."
    )


class _FixedOutput(BaseModelOutput):
    """The output of a base model that has last hidden states only; all other fields are None."""

    def __getattr__(self, name: str) -> None:
        """Return None for whatever else a family's head reads, such as a cache or router logits."""
        if name.startswith("_"):
            raise AttributeError(name)


class _FixedBase(nn.Module):
    """Replaces the base model and returns the hidden states that it gets as `inputs_embeds`."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.config = getattr(base, "config", None)

    @property
    def decoder(self) -> _FixedBase:
        """Return itself, since OPT and Bart call the decoder of their base model."""
        return self

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> BaseModelOutput:
        """Return the given hidden states as the last ones."""
        return _FixedOutput(last_hidden_state=inputs_embeds)


def lm_head(lm: PreTrainedModel, output: nn.Module | None = None) -> Head:
    """Make a function from hidden states to logits with everything that the family computes after its base model.

    It calls the model's own forward with a base model that returns the given states. So soft-capping and logit scales
    are applied for every family.

    Args:
        lm: The language model, whose parameters are shared.
        output: Replaces the output embeddings of the model, if given.

    Returns:
        A function from [N, H] to [N, V].
    """
    shell = replaced(lm, base_model(lm), _FixedBase(base_model(lm)))
    if output is not None:
        shell = replaced(shell, lm.get_output_embeddings(), output)

    def head(hidden: Tensor) -> Tensor:
        states = hidden[None]
        given: dict[str, Any] = {"inputs_embeds": states}
        if is_encoder_decoder(lm):
            given = {"decoder_inputs_embeds": states, "encoder_outputs": _FixedOutput(last_hidden_state=states)}
        return cast(Tensor, shell(**given, use_cache=False).logits.squeeze(0))  # whose gradient is no copy

    head.of_model = lm  # type: ignore[attr-defined]  # for `vocabulary_of`
    return head


def replaced(module: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Copy a module without its hooks, with one of its submodules replaced. All other parts are shared.

    Args:
        module: The module, which is not changed.
        old: The submodule, at any depth.
        new: What takes its place.

    Returns:
        The copy; `new` itself if the module is `old`.
    """
    if module is old:
        return new
    shell = copy.copy(module)
    shell._forward_pre_hooks, shell._forward_hooks = OrderedDict(), OrderedDict()  # they are for calls of the module
    shell._modules = {
        name: part if part is None or all(inner is not old for inner in part.modules()) else replaced(part, old, new)
        for name, part in module._modules.items()
    }
    return shell


@dataclass
class BlockInputs:
    """The arguments of one call of a block, and the inputs of the base model that led to it.

    All arguments are kept because hidden states are not the only thing that blocks pass on: those of T5 also pass the
    position bias of the first block.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: Mapping[str, Tensor]

    @property
    def hidden(self) -> Tensor:
        """Return the hidden states that enter the block. [B, T, H]"""
        return cast(Tensor, self.args[0] if self.args else self.kwargs["hidden_states"])


@contextmanager
def recorded(block: nn.Module) -> Iterator[dict[str, Any]]:
    """Record the first call of a block: "args", "kwargs", and "values", the length of its output if that is a tuple."""
    record: dict[str, Any] = {}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record.setdefault("args", args)
        record.setdefault("kwargs", kwargs)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        record["values"] = len(output) if isinstance(output, tuple) else None

    with block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave):
        yield record


def run_base(
    lm: PreTrainedModel, inputs: Mapping[str, Tensor], branches: Sequence[int] = (), *, base: nn.Module | None = None
) -> tuple[Tensor, dict[int, BlockInputs]]:
    """Run the base model and, of an encoder-decoder, its encoder.

    Args:
        lm: The language model.
        inputs: Keyword arguments as `Completion.inputs` makes them for this kind of model.
        branches: The numbers of blocks whose inputs are recorded.
        base: Runs in place of the base model; it has the same blocks.

    Returns:
        The last hidden states [B, T, H], and the recorded inputs by the number of the block.
    """
    if is_encoder_decoder(lm):
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        inputs = {
            "input_ids": inputs["decoder_input_ids"],
            "attention_mask": inputs["decoder_attention_mask"],
            "encoder_hidden_states": cast(Any, lm.get_encoder())(input_ids=ids, attention_mask=mask).last_hidden_state,
            "encoder_attention_mask": mask,
        }
    with ExitStack() as stack:
        stack.enter_context(piece_by_piece(lm, inputs.get("attention_mask")))
        records = {at: stack.enter_context(recorded(blocks(lm)[at])) for at in branches}
        hidden: Tensor = (base or base_model(lm))(**inputs, use_cache=False).last_hidden_state
    return hidden, {at: BlockInputs(record["args"], record["kwargs"], inputs) for at, record in records.items()}


def use_eager_attention_if_biased(lm: PreTrainedModel) -> None:
    """Make attention with a trained position bias, as in T5, compute the same with and without gradients.

    The fused attention of torch has no gradient for such a bias, so it would run for the reference and not for the
    policy. Besides, the decoder of UMT5 sees later tokens under it in transformers 5.17. Encoder and decoder are
    switched one by one, because before transformers 5.20 they do not follow the whole model.

    Args:
        lm: A language model, changed in place. Other families are left as they are.
    """
    if hasattr(lm.config, "relative_attention_num_buckets"):
        for part in lm.modules():
            if isinstance(part, PreTrainedModel):
                part.set_attn_implementation("eager")


def keeps_packed_apart(lm: PreTrainedModel) -> bool:
    """Test whether a model keeps the samples of a packed row apart when only their positions start again.

    The same tokens twice in one row must have the same hidden states. OPT, Falcon and Bloom mix the samples.

    Args:
        lm: A causal language model.

    Returns:
        True if packing is safe.
    """
    index = torch.arange(min(8, lm.config.get_text_config().vocab_size), device=lm.device).repeat(2)[None]
    with torch.no_grad(), evaluating(lm):
        first, second = run_base(lm, {"input_ids": index, "position_ids": index})[0].float().chunk(2, dim=1)
    # Rounding errors are far below this bound, and mixed samples far above, even with random weights.
    return bool((first - second).norm() < 1e-3 * first.norm())


def probe(lm: PreTrainedModel) -> dict[str, Tensor]:
    """Make the inputs of a small test run."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device=lm.device)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return given | {f"decoder_{name}": value for name, value in given.items()} if is_encoder_decoder(lm) else given


def padded_probe(lm: PreTrainedModel) -> dict[str, Tensor]:
    """Make the inputs of a small test run that compares states: two rows, of which one has padding in front."""
    ids = torch.arange(16, device=lm.device).view(2, 8) % lm.config.get_text_config().vocab_size
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if is_encoder_decoder(lm):
        return given | {"decoder_input_ids": ids, "decoder_attention_mask": torch.ones_like(ids)}
    return given | {"position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0)}


def rotates_by_length(lm: PreTrainedModel) -> bool:
    """Return whether rotary embeddings of a model depend on the longest position in a forward pass, of any row."""
    config = lm.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [part for part in (rope, *rope.values()) if isinstance(part, dict)]  # one for all layers, or for each type
    return any(part.get("rope_type", part.get("type")) in ("longrope", "dynamic") for part in parts)


def embedding_width(embeddings: nn.Module) -> int:
    """Return the width of an embedding matrix."""
    return cast(Tensor, embeddings.weight).shape[1]
