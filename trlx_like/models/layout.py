"""Where the parts of a Hugging Face language model are, found by structure instead of a table of families.

Of an encoder-decoder the base model, with its blocks, is the decoder: what it reads besides its own tokens are the
encoder's last hidden states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from trlx_like.errors import ConfigError

Head = Callable[[Tensor], Tensor]


def base_model(lm: PreTrainedModel) -> nn.Module:
    """The model without its head: ids in, last hidden state (after the final norm) out."""
    base: nn.Module = lm.get_decoder() if is_encoder_decoder(lm) else lm.base_model
    if base is lm:
        raise _headless(lm)
    return base


def check_has_lm_head(lm: PreTrainedModel) -> None:
    """ConfigError for a model that gives no logits of tokens."""
    base_model(lm)
    if lm.get_output_embeddings() is None:
        raise _headless(lm)


def _headless(lm: PreTrainedModel) -> ConfigError:
    return ConfigError(f"model.model_path: {type(lm).__name__} is not a language model with a head.")


def is_encoder_decoder(lm: PreTrainedModel) -> bool:
    return bool(lm.config.is_encoder_decoder)


def decoder_start(lm: PreTrainedModel) -> int | None:
    """The token that the decoder of an encoder-decoder begins with; None for a causal model, which has none."""
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
    """Width of the last hidden state. OPT-350m, for one, projects it to less than `config.hidden_size`."""
    return _width(lm.get_output_embeddings())


def vocabulary_size(lm: PreTrainedModel) -> int:
    """Tokens that the LM head has a logit for; some models have more than their tokenizer."""
    weight = lm.get_output_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def last_hidden_module(lm: PreTrainedModel) -> nn.Module:
    """What every forward of the model runs and whose output's `last_hidden_state` its LM head reads."""
    decoder: nn.Module = lm.get_decoder()
    return decoder


def blocks(lm: PreTrainedModel) -> nn.ModuleList:
    """The transformer blocks, bottom first."""
    base = base_model(lm)
    config = base.config if is_encoder_decoder(lm) else lm.config.get_text_config()
    names = ("num_decoder_layers", "decoder_layers", "num_hidden_layers")
    return _find_blocks(base, next(getattr(config, name) for name in names if hasattr(config, name)))


def _find_blocks(base: nn.Module, count: int) -> nn.ModuleList:
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ConfigError(
        f"model.model_path: no list of {count} blocks was found in {type(base).__name__}; "
        "use model.num_layers_unfrozen: -1 with this family."
    )


class _FixedOutput(BaseModelOutput):
    """Answers None for what else a family's head looks up (a cache, cross attentions, router logits)."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _FixedBase(nn.Module):
    """Stands in for the base model and returns the hidden states that it is handed."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.config = getattr(base, "config", None)

    @property
    def decoder(self) -> _FixedBase:
        """What OPT and Bart call in place of their base model."""
        return self

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> BaseModelOutput:
        return _FixedOutput(last_hidden_state=inputs_embeds)


def lm_head(lm: PreTrainedModel, output: nn.Module | None = None) -> Head:
    """A function from hidden states [N, H] to logits [N, V] with everything the family does after its base model.

    It is the model's own forward around a base model that returns what it is given, so soft-caps and logit scales
    are applied. Parameters are shared with `lm`, but for those of `output`, which replaces the output embeddings.
    """
    shell = _with(lm, base_model(lm), _FixedBase(base_model(lm)))
    if output is not None:
        shell = _with(shell, lm.get_output_embeddings(), output)

    def head(hidden: Tensor) -> Tensor:
        states = hidden[None]
        given: dict[str, Any] = {"inputs_embeds": states}
        if is_encoder_decoder(lm):
            given = {"decoder_inputs_embeds": states, "encoder_outputs": _FixedOutput(last_hidden_state=states)}
        logits: Tensor = shell(**given, use_cache=False).logits[0]
        return logits

    return head


def _with(module: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """`module` with `new` in the place of `old`. All other parts are shared."""
    if module is old:
        return new
    shell = copy.copy(module)
    shell._modules = {
        name: part if part is None or all(inner is not old for inner in part.modules()) else _with(part, old, new)
        for name, part in module._modules.items()
    }
    return shell


@dataclass
class BlockInputs:
    """The call of a block: `args` and `kwargs`, and the inputs of the base model that it was made for.

    Hidden states are not all that blocks hand on: those of T5 pass the first one's position bias along.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: Mapping[str, Tensor]

    @property
    def hidden(self) -> Tensor:
        """[B, T, H]"""
        states: Tensor = self.args[0] if self.args else self.kwargs["hidden_states"]
        return states


@contextmanager
def _recorded(block: nn.Module) -> Iterator[dict[str, Any]]:
    """Keeps what `block` is called with ("args", "kwargs") and how many values it returns as a tuple ("values")."""
    record: dict[str, Any] = {}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record.setdefault("args", args)
        record.setdefault("kwargs", kwargs)

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        record["values"] = len(output) if isinstance(output, tuple) else None

    handles = [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def run_base(
    lm: PreTrainedModel, inputs: Mapping[str, Tensor], branches: Sequence[int] = ()
) -> tuple[Tensor, dict[int, BlockInputs]]:
    """Last hidden state [B, T, H], and for each number in `branches` what enters that block.

    inputs: as `Completion.inputs` makes them for this kind of model.
    """
    inputs = _base_inputs(lm, inputs)
    with ExitStack() as stack:
        records = {at: stack.enter_context(_recorded(blocks(lm)[at])) for at in branches}
        hidden: Tensor = base_model(lm)(**inputs, use_cache=False).last_hidden_state
    return hidden, {at: BlockInputs(record["args"], record["kwargs"], inputs) for at, record in records.items()}


def _base_inputs(lm: PreTrainedModel, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Inputs of the base model: for a decoder what the encoder has read."""
    if not is_encoder_decoder(lm):
        return inputs
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    encoder: Any = lm.get_encoder()
    return {
        "input_ids": inputs["decoder_input_ids"],
        "attention_mask": inputs["decoder_attention_mask"],
        "encoder_hidden_states": encoder(input_ids=ids, attention_mask=mask).last_hidden_state,
        "encoder_attention_mask": mask,
    }


def use_eager_attention_if_biased(lm: PreTrainedModel) -> None:
    """Makes attention with a trained position bias, such as T5's, compute the same with and without gradients.

    torch's fused attention has no gradient of such a bias, so it would run for the reference and not for the policy;
    and under it the decoder of UMT5 sees tokens ahead in transformers 5.17. Encoder and decoder are told one by one:
    before transformers 5.20 they do not follow the whole.
    """
    if hasattr(lm.config, "relative_attention_num_buckets"):
        for part in lm.modules():
            if isinstance(part, PreTrainedModel):
                part.set_attn_implementation("eager")


def keeps_packed_apart(lm: PreTrainedModel) -> bool:
    """Whether positions that start again keep the samples of a packed row apart. OPT, Falcon and Bloom mix them.

    Tried out: the same tokens twice in a row must have the same hidden states.
    """
    index = torch.arange(min(8, lm.config.get_text_config().vocab_size), device=lm.device).repeat(2)[None]
    was_training = lm.training
    lm.eval()
    with torch.no_grad():
        first, second = run_base(lm, {"input_ids": index, "position_ids": index})[0].float().chunk(2, dim=1)
    lm.train(was_training)
    # Rounding is far below, and mixing far above, even with random weights.
    return bool((first - second).norm() < 1e-3 * first.norm())


def freeze_below(lm: PreTrainedModel, branch: int) -> None:
    """Freezes every parameter that acts on what enters block `branch`, tied ones included, and all of an encoder.

    They are read off the autograd graph, so embeddings, their norms and projections need no names.
    """
    with torch.enable_grad():
        entering = run_base(lm, _probe(lm), [branch])[1][branch]
    queue, seen = [value.grad_fn for value in (entering.hidden, *entering.inputs.values())], set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            node.variable.requires_grad_(False)
        queue.extend(parent for parent, _ in node.next_functions)


def _probe(lm: PreTrainedModel) -> dict[str, Tensor]:
    ids = torch.zeros(1, 2, dtype=torch.int64, device=lm.device)
    if is_encoder_decoder(lm):
        ones = torch.ones_like(ids)
        return {
            "input_ids": ids,
            "attention_mask": ones,
            "decoder_input_ids": ids,
            "decoder_attention_mask": ones,
        }
    return {"input_ids": ids}


class _PassThrough(nn.Module):
    """A block that does nothing, and returns it the way its family does."""

    def __init__(self, block: nn.Module, values: int | None) -> None:
        super().__init__()
        self.values = values
        for name, value in vars(block).items():  # loops read such things as `attention_type` off the block
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return hidden_states if self.values is None else (hidden_states, *[None] * (self.values - 1))


class TopBlocks(nn.Module):
    """A copy of the blocks from `branch` up and of what follows them, run from what enters the block at the branch.

    The family's own forward runs, with pass-through blocks below the branch and the branch's arguments replaced, so
    masks, positions and rotary embeddings are the model's own.
    """

    def __init__(self, lm: PreTrainedModel, branch: int) -> None:
        super().__init__()
        with torch.no_grad(), _recorded(blocks(lm)[0]) as record:
            run_base(lm, _probe(lm))
        base: Any = base_model(lm)
        embeddings = base.get_input_embeddings()
        self.embedding_width = _width(embeddings)
        replaced: dict[int, Any] = {id(embeddings): nn.Identity()}
        for block in blocks(lm)[:branch]:
            replaced[id(block)] = _PassThrough(block, record["values"])
        self.base = copy.deepcopy(base, replaced)
        self._entering: BlockInputs | None = None
        _find_blocks(self.base, len(blocks(lm)))[branch].register_forward_pre_hook(self._inject, with_kwargs=True)

    def _inject(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self._entering is not None
        return self._entering.args, self._entering.kwargs

    def forward(self, entering: BlockInputs) -> Tensor:
        """Last hidden state [B, T, H]."""
        self._entering = entering
        ignored = entering.hidden.new_zeros(1).expand(*entering.hidden.shape[:2], self.embedding_width)
        given = {name: value for name, value in entering.inputs.items() if name != "input_ids"}
        hidden: Tensor = self.base(**given, inputs_embeds=ignored, use_cache=False).last_hidden_state
        return hidden


def _width(embeddings: nn.Module) -> int:
    weight = embeddings.weight
    assert isinstance(weight, Tensor)
    return weight.shape[1]
