"""Merging of adapters into the weights of the model that they were added to."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trlx_like.models.formats import forget_quantization, is_quantized, plain_layer

Model = TypeVar("Model", bound=nn.Module)


def has_adapter(lm: nn.Module) -> bool:
    """Return True if a model has an adapter, loaded or added."""
    return bool(getattr(lm, "_hf_peft_config_loaded", False))


def weights_for_rate(model: nn.Module) -> tuple[int, bool]:
    """Return what the learning rate "auto" goes by, see `optim.learning_rate_for`.

    Returns:
        The number of weights, and whether an adapter is trained. Of a policy, all weights of the language model count,
        frozen or not, but those of heads and of the adapter; of another model, the trained weights.
    """
    lm: PreTrainedModel | None = getattr(model, "lm", None)
    if lm is None:
        return sum(weight.numel() for weight in model.parameters() if weight.requires_grad), False
    adapter = has_adapter(lm)  # it alone is trained then
    # transformers counts a packed byte of 4-bit weights as two.
    return lm.num_parameters() - adapter * lm.num_parameters(only_trainable=True), adapter


def merged(lm: Model) -> Model:
    """Copy a model with its adapter merged into the weights, so that the copy needs no peft.

    If layers share a weight (tied embeddings) and the adapter changes only one of them, the copy unties them.

    Args:
        lm: A model with an adapter. It is not changed.

    Returns:
        A model of the same class without an adapter and with the same outputs.
    """
    whole: Any = copy.deepcopy(lm)
    shared = shared_weights(whole)
    for name, module in list(whole.named_modules()):
        if adapts(module):
            for owner, own in _held(module):
                if owner._parameters[own] in shared:
                    owner._parameters[own] = nn.Parameter(owner._parameters[own].detach().clone())
            whole.set_submodule(name, _merge(_plain(module, lm)))
    for name, module in list(whole.named_modules()):
        if is_quantized(module):
            whole.set_submodule(name, plain_layer(module, cast(Any, lm).dtype))
    forget_quantization(whole)
    if shared and not shared_weights(whole):
        whole.config.get_text_config().tie_word_embeddings = whole.config.tie_word_embeddings = False
    whole._hf_peft_config_loaded = False
    del whole.peft_config
    if any("base_model" in str(one.source_patterns) for one in getattr(whole, "_weight_conversions", None) or ()):
        del whole._weight_conversions  # a loaded adapter's, by which transformers would rename all weights on saving
    return cast(Model, whole)


def plain_weights(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights of a model with its adapter merged, under their names in the model without an adapter.

    The model is not changed, and only one layer is copied at a time. A weight that layers share comes once. These are
    the weights that `merged` would have.

    Args:
        lm: A model with or without an adapter.

    Yields:
        Name and detached weight.
    """
    if not has_adapter(lm):
        yield from ((name, weight.detach()) for name, weight in lm.named_parameters())
        return
    inside, seen = "", set[Tensor]()
    for path, module in lm.named_modules():
        if inside and path.startswith(inside):
            continue
        inside = f"{path}." if adapts(module) else ""
        if inside:
            own = dict(_merge(_plain(copy.deepcopy(module), lm)).named_parameters())
        elif is_quantized(module):
            own = dict(plain_layer(module, cast(Any, lm).dtype).named_parameters())
        else:
            own = {name: weight for name, weight in module.named_parameters(recurse=False) if weight not in seen}
            seen.update(own.values())
        yield from ((f"{path}.{name}".removeprefix("."), weight.detach()) for name, weight in own.items())


def mismerged_weights(lm: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """Iterate over the weights that typical mistakes would give: the adapter left out, or merged twice.

    The canary compares a wrong copy of the model with these to say what went wrong.

    Args:
        lm: A model with an adapter; of one without, nothing is yielded.

    Yields:
        Name of the weight in the model without an adapter, the mistake in words, and the weight after it.
    """
    for path, module in lm.named_modules() if has_adapter(lm) else ():
        if adapts(module) and hasattr(module, "get_base_layer"):
            never, once, twice = (_plain(copy.deepcopy(module), lm) for _ in range(3))
            twice.get_base_layer().load_state_dict(_merge(once).state_dict())
            for cause, own in (
                ("without the adapter", never.get_base_layer()),
                ("with the adapter twice", _merge(twice)),
            ):
                yield from ((f"{path}.{name}", cause, weight.detach()) for name, weight in own.named_parameters())


def _held(model: nn.Module) -> list[tuple[Any, str]]:
    """List every place of a parameter, as (module that holds it, its name there)."""
    return [
        (module, name) for module in model.modules() for name, value in module._parameters.items() if value is not None
    ]


def shared_weights(model: nn.Module) -> set[Tensor]:
    """Return the parameters that several modules hold."""
    uses = Counter(module._parameters[name] for module, name in _held(model))
    return {weight for weight, count in uses.items() if count > 1}


def adapted_weights(lm: nn.Module) -> set[Tensor]:
    """Return the parameters of the layers that an adapter was added to."""
    return {m._parameters[name] for module in lm.modules() if adapts(module) for m, name in _held(module)}


def adapts(module: nn.Module) -> bool:
    """Return True if an adapter has replaced one of the model's own modules by this one."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def _plain(module: Any, lm: nn.Module) -> Any:
    """Give an adapter layer on quantized weights the weights that it computes with, in place, and return it.

    peft would quantize the merged weights again, and lose most of the adapter.
    """
    layer = module.get_base_layer() if hasattr(module, "get_base_layer") else module
    if is_quantized(layer):
        from peft.tuners.lora import Linear

        module.base_layer = plain_layer(layer, cast(Any, lm).dtype)
        module.__class__, module.fan_in_fan_out = Linear, isinstance(module.base_layer, Conv1D)
    return module


def _merge(module: Any) -> nn.Module:
    """Merge an adapter layer in place, and return the model's own module."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not isinstance(module, BaseTunerLayer):  # trained as a whole
        own: nn.Module = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        return own
    module.merge()
    return module.get_base_layer()
