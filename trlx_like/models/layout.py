"""Where the parts of a Hugging Face causal language model are, found by structure instead of a table of families."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from trlx_like.errors import ConfigError

Head = Callable[[Tensor], Tensor]


def base_model(lm: PreTrainedModel) -> nn.Module:
    """The model without its LM head: ids in, last hidden state (after the final norm) out."""
    base: nn.Module = lm.base_model
    if base is lm:
        raise ConfigError(f"model.model_path: {type(lm).__name__} is not a causal language model with a head.")
    return base


def hidden_size(lm: PreTrainedModel) -> int:
    """Width of the last hidden state. OPT-350m, for one, projects it to less than `config.hidden_size`."""
    return _width(lm.get_output_embeddings())


def blocks(lm: PreTrainedModel) -> nn.ModuleList:
    """The transformer blocks, bottom first."""
    return _find_blocks(base_model(lm), lm.config.get_text_config().num_hidden_layers)


def _find_blocks(base: nn.Module, count: int) -> nn.ModuleList:
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise ConfigError(
        f"model.model_path: no list of {count} blocks was found in {type(base).__name__}; "
        "use model.num_layers_unfrozen: -1 with this family."
    )


class _GivenOutput(BaseModelOutputWithPast):
    """Answers None for what else a family's head looks up (cross attentions, router logits)."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Given(nn.Module):
    """Stands in for the base model and returns the hidden states that it is handed."""

    @property
    def decoder(self) -> _Given:
        """What OPT and Bart call in place of their base model."""
        return self

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> BaseModelOutputWithPast:
        return _GivenOutput(last_hidden_state=inputs_embeds)


def lm_head(lm: PreTrainedModel, output: nn.Module | None = None) -> Head:
    """A function from hidden states [N, H] to logits [N, V] with everything the family does after its base model.

    It is the model's own forward around a base model that returns what it is given, so soft-caps and logit scales
    are applied. Parameters are shared with `lm`, but for those of `output`, which replaces the output embeddings.
    """
    shell = copy.copy(lm)
    shell._modules = dict(lm._modules)
    base_name = next(name for name, module in lm._modules.items() if module is base_model(lm))
    shell._modules[base_name] = _Given()
    if output is not None:
        own = lm.get_output_embeddings()
        name = next(name for name, module in lm._modules.items() if module is own)
        shell._modules[name] = output

    def head(hidden: Tensor) -> Tensor:
        logits: Tensor = shell(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    return head


@contextmanager
def _recorded(block: nn.Module) -> Iterator[dict[str, Any]]:
    """Keeps the hidden state that enters `block` ("input") and whether it returns a tuple ("tuple")."""
    record: dict[str, Any] = {}

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record.setdefault("input", args[0] if args else kwargs["hidden_states"])

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        record["tuple"] = isinstance(output, tuple)

    handles = [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()


def run_base(
    lm: PreTrainedModel, inputs: Mapping[str, Tensor], branches: Sequence[int] = ()
) -> tuple[Tensor, dict[int, Tensor]]:
    """Last hidden state [B, T, H], and for each number in `branches` the hidden state that enters that block."""
    with ExitStack() as stack:
        records = {at: stack.enter_context(_recorded(blocks(lm)[at])) for at in branches}
        hidden: Tensor = base_model(lm)(**inputs, use_cache=False).last_hidden_state
    return hidden, {at: record["input"] for at, record in records.items()}


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
    """Freezes every parameter that acts on the hidden state entering block `branch`, tied ones included.

    They are read off the autograd graph, so embeddings, their norms and projections need no names.
    """
    with torch.enable_grad():
        entering = run_base(lm, _probe(lm), [branch])[1][branch]
    queue, seen = [entering.grad_fn], set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            node.variable.requires_grad_(False)
        queue.extend(parent for parent, _ in node.next_functions)


def _probe(lm: PreTrainedModel) -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(1, 2, dtype=torch.int64, device=lm.device)}


class _PassThrough(nn.Module):
    """A block that does nothing, and returns it the way its family does."""

    def __init__(self, block: nn.Module, returns_tuple: bool) -> None:
        super().__init__()
        self.returns_tuple = returns_tuple
        for name, value in vars(block).items():  # loops read such things as `attention_type` off the block
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor]:
        return (hidden_states,) if self.returns_tuple else hidden_states


class TopBlocks(nn.Module):
    """A copy of the blocks from `branch` up and of what follows them, run from the hidden state at the branch.

    The family's own forward runs, with pass-through blocks below the branch and the branch's input replaced, so masks,
    positions and rotary embeddings are the model's own. Shapes: branch [B, T, H] -> last hidden state [B, T, H].
    """

    def __init__(self, lm: PreTrainedModel, branch: int) -> None:
        super().__init__()
        with torch.no_grad(), _recorded(blocks(lm)[0]) as record:
            base_model(lm)(**_probe(lm), use_cache=False)
        self.embedding_width = _width(lm.get_input_embeddings())
        replaced: dict[int, Any] = {id(lm.get_input_embeddings()): nn.Identity()}
        for block in blocks(lm)[:branch]:
            replaced[id(block)] = _PassThrough(block, record["tuple"])
        self.base = copy.deepcopy(base_model(lm), replaced)
        self._entering: Tensor | None = None
        _find_blocks(self.base, len(blocks(lm)))[branch].register_forward_pre_hook(self._inject, with_kwargs=True)

    def _inject(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self._entering, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._entering}

    def forward(self, entering: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        self._entering = entering
        ignored = entering.new_zeros(1).expand(*entering.shape[:2], self.embedding_width)
        given = {name: value for name, value in inputs.items() if name != "input_ids"}
        hidden: Tensor = self.base(**given, inputs_embeds=ignored, use_cache=False).last_hidden_state
        return hidden


def _width(embeddings: nn.Module) -> int:
    weight = embeddings.weight
    assert isinstance(weight, Tensor)
    return weight.shape[1]
