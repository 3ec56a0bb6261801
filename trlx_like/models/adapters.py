"""Adapters such as LoRA, made by peft: a few trained weights in a frozen model.

peft replaces layers inside the model, so a model with an adapter keeps its class and works wherever the model does. Two
kinds are left out on purpose: prompt tuning, which does not replace layers, and AdaLoRA, which must be called in every
training step.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.peft_utils import find_adapter_config_file

from trlx_like.errors import ConfigError, raised_as
from trlx_like.imports import needed
from trlx_like.models.formats import is_quantized
from trlx_like.models.merging import adapted_weights, adapts, has_adapter, shared_weights
from trlx_like.registry import nearest

logger = logging.getLogger(__name__)

OPTION = "model.peft_config"
KINDS = ("LORA", "IA3", "LOHA", "LOKR")
"""The values of `peft_type` that are supported and tested."""

_NAME = "default"  # peft's own name for the only adapter of a model


def import_peft() -> Any:
    """Import peft.

    Returns:
        The module.

    Raises:
        ConfigError: If peft is not installed; it names the extra to install.
    """
    with needed(f"{OPTION}: adapters need peft", "peft"):
        import peft
    return peft


def read_adapter(given: Any) -> Any:
    """Convert `model.peft_config` to a `PeftConfig` and check it.

    Args:
        given: A `PeftConfig`, which is copied, or a mapping with `peft_type` and the options of that kind.

    Returns:
        A new `PeftConfig`.

    Raises:
        ConfigError: For a kind that is not supported, and for an option that the kind does not have.
    """
    peft = import_peft()
    if isinstance(given, peft.PeftConfig):
        made = copy.deepcopy(given)
    elif isinstance(given, Mapping):
        made = _from_mapping(peft, given)
    else:
        raise ConfigError(f"{OPTION} must be a peft configuration or a mapping of its options, not {given!r}.")
    kind = _kind(made.peft_type)
    if kind not in KINDS:
        raise ConfigError(f"{OPTION}: {kind} is not supported; peft_type may be {', '.join(KINDS)}.")
    if getattr(made, "bias", "none") != "none":
        raise ConfigError(f"{OPTION}.bias ({made.bias!r}): biases are not part of an adapter here; use 'none'.")
    if getattr(made, "init_lora_weights", True) not in (True, False, "gaussian"):
        raise ConfigError(
            f"{OPTION}.init_lora_weights ({made.init_lora_weights!r}) changes the weights of the model, which the "
            "adapter's folder does not hold; use true, false or 'gaussian'."
        )
    made.inference_mode = False
    return made


def _from_mapping(peft: Any, given: Mapping[str, Any]) -> Any:
    """Make a `PeftConfig` of a mapping, or raise ConfigError for an unknown kind or option."""
    kinds = {_kind(kind): cls for kind, cls in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    kind = _kind(given.get("peft_type"))
    if kind not in kinds:
        raise ConfigError(f"{OPTION}.peft_type ({given.get('peft_type')!r}) must be one of {', '.join(KINDS)}.")
    names = [field.name for field in dataclasses.fields(kinds[kind]) if field.init]
    for name in given:
        if name not in names:
            close = nearest(str(name), names)
            raise ConfigError(
                f"{OPTION}.{name}: {kind} has no such option.{f' Did you mean {close}?' if close else ''}"
            )
    with raised_as(ConfigError, (TypeError, ValueError), OPTION):
        return kinds[kind](**{**given, "peft_type": kind})


def _kind(value: Any) -> str:
    """Return the name of a peft type in capitals, given as text or as peft's enum."""
    return str(getattr(value, "value", value)).upper()


def add_adapter(lm: PreTrainedModel, given: Any, source: str | None) -> None:
    """Add a new adapter to a model, freezing all other weights. Uses torch's random numbers.

    Args:
        lm: The model, changed in place.
        given: The adapter's configuration, as for `read_adapter`.
        source: The folder or hub name of the model, which is written into the adapter's folder when it is saved; None
            if the model cannot be loaded again.

    Raises:
        ConfigError: If the model already has an adapter, or the configuration does not fit it.
    """
    if has_adapter(lm):
        raise ConfigError(
            f"{OPTION}: model.model_path has an adapter already, which is trained on when {OPTION} is left out; for a "
            "new one, start from a folder that save_pretrained(..., merged=True) wrote."
        )
    config = read_adapter(given)
    fits = raised_as(ConfigError, (TypeError, ValueError), f"{OPTION} does not fit {type(lm).__name__}")
    with fits, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # for GPT-2; peft corrects it
        lm.add_adapter(config, _NAME)
    if lm.config.is_encoder_decoder and not shared_weights(lm).isdisjoint(adapted_weights(lm)):
        raise ConfigError(
            f"{OPTION}: the embeddings of {type(lm).__name__} share a weight, so that an adapter on one of them could "
            "not be merged into the model; leave them out of target_modules and modules_to_save."
        )
    is_folder = source is not None and Path(source).is_dir()
    config.base_model_name_or_path = str(Path(source).resolve()) if source is not None and is_folder else source
    config.task_type = config.task_type or ("SEQ_2_SEQ_LM" if lm.config.is_encoder_decoder else "CAUSAL_LM")
    _prepare_trained(lm)


def train_adapter(lm: PreTrainedModel) -> None:
    """Make the adapter that a model was loaded with trainable, and freeze all other weights.

    Args:
        lm: The model, changed in place. Adapters that are not active, such as a reward adapter, stay as they are.

    Raises:
        ConfigError: Unless the model has exactly one active adapter, under peft's default name.
    """
    if lm.active_adapters() != [_NAME]:
        names = ", ".join(lm.active_adapters())
        raise ConfigError(f"model.model_path has the active adapters {names}; it must have only one, named {_NAME!r}.")
    lm.requires_grad_(False)
    lm.set_adapter(_NAME)
    lm.peft_config[_NAME].inference_mode = False
    _prepare_trained(lm)


def sort_names(config: Any) -> None:
    """Sort the sets of names of a `PeftConfig`, which would be saved in another order by each process."""
    vars(config).update({name: sorted(value) for name, value in vars(config).items() if isinstance(value, set)})


def _prepare_trained(lm: PreTrainedModel) -> None:
    """Store the adapter in float32, also beside a model of 16 bits."""
    sort_names(lm.peft_config[_NAME])
    for name, parameter in lm.named_parameters():
        # peft converts what goes in and out of its layers, but not of the copies of whole layers.
        if parameter.requires_grad and "modules_to_save" not in name:
            parameter.data = parameter.data.float()


def log_trained(lm: nn.Module) -> None:
    """Log how many weights of a model with an adapter are trained."""
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in lm.parameters()]
    trained, all_of_them = sum(n for n, trains in counts if trains), sum(n for n, _ in counts)
    logger.info("Training an adapter: %d of %d weights (%.2f %%).", trained, all_of_them, 100 * trained / all_of_them)


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside a `PeftModel`, with its adapter; other objects are returned as they are.

    Args:
        model: Any value of `model.model_path`.

    Returns:
        A model that transformers saves and loads with its adapter.

    Raises:
        ConfigError: If its adapter is not supported, see `read_adapter`.
    """
    if not hasattr(model, "peft_config") or isinstance(model, PreTrainedModel) or not hasattr(model, "get_base_model"):
        return model
    for config in model.peft_config.values():
        read_adapter(config)
    lm = model.get_base_model()
    lm.peft_config = model.peft_config
    lm._hf_peft_config_loaded = True  # as transformers' add_adapter does, so that it saves the adapter
    return lm


def base_of(path: str) -> str | None:
    """Find the model that an adapter was trained for.

    Args:
        path: A folder or hub name.

    Returns:
        The path of the model as the adapter's configuration has it; None if `path` holds no adapter.

    Raises:
        ConfigError: If the adapter's configuration does not name a model, or peft is missing.
    """
    try:
        found = find_adapter_config_file(path)
    except (OSError, ValueError):  # `from_pretrained` has a better message for an impossible name
        return None
    if found is None:
        return None
    import_peft()
    try:
        base: str | None = json.loads(Path(found).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"model.model_path ({path!r}): its adapter_config.json cannot be read: {error}.") from error
    if base is None:
        raise ConfigError(f"model.model_path ({path!r}): its adapter_config.json does not name the model it is for.")
    return base


def leave_out_frozen(model: nn.Module, part: nn.Module) -> None:
    """Exclude the frozen weights of a part from a model's state dict, on saving and on loading.

    They can be loaded from where they came from. Frozen weights outside of the part, such as ILQL's target heads, stay.

    Args:
        model: The model whose `state_dict` and `load_state_dict` are changed.
        part: A submodule of it, such as a language model with an adapter.
    """
    known = {id(value) for value in part.parameters() if not value.requires_grad}
    frozen = {name for name, value in model.named_parameters(remove_duplicate=False) if id(value) in known}
    # Layers of bitsandbytes add their scales, which are no parameters.
    quantized = tuple(f"{name}." for name, module in model.named_modules() if is_quantized(module))

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for name in list(state):
            own = name.removeprefix(prefix)
            if own in frozen or own.startswith(quantized):
                del state[name]

    def ignore(module: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in frozen]

    model.register_state_dict_post_hook(drop)
    model.register_load_state_dict_post_hook(ignore)


class AdapterWeights(nn.Module):
    """A frozen copy of a model's trainable weights, which can temporarily replace them.

    Args:
        lm: The model. Its parameters with `requires_grad` are copied.
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        held = [(place, place.module._parameters[place.name]) for place in _places(lm)]
        trained = [(place, value) for place, value in held if value is not None and value.requires_grad]
        self._places = [place for place, _ in trained]
        self.frozen = nn.ParameterList([value.detach().clone() for _, value in trained]).requires_grad_(False)

    @property
    def outside_layers(self) -> bool:
        """Whether some of the weights belong to no layer of an adapter."""
        return any(place.layer is None for place in self._places)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the copied weights into the model for the duration of a block.

        Those of an adapter's layer are put there only while the layer runs: if weights are divided over processes, the
        present ones are put into their places just before, with the block that the layer is in. Graphs that were built
        before keep the present weights and their gradients.
        """
        by_layer: dict[nn.Module | None, list[tuple[_Place, Tensor]]] = {}
        for place, value in zip(self._places, self.frozen, strict=True):
            by_layer.setdefault(place.layer, []).append((place, value))
        with ExitStack() as stack:
            for layer, values in by_layer.items():
                stack.enter_context(_swapped(values) if layer is None else _swapped_while_running(layer, values))
            yield


@dataclass(frozen=True)
class _Place:
    """Name a parameter by the module that holds it, and the layer of an adapter that the module is in, if any."""

    layer: nn.Module | None
    module: nn.Module
    name: str


def _places(lm: nn.Module) -> Iterator[_Place]:
    """Iterate over all parameters of a model, in the order of `modules`."""
    adapted = has_adapter(lm)
    layer, inside = None, ""
    for path, module in lm.named_modules():
        if not (layer is not None and path.startswith(inside)):
            layer = module if adapted and adapts(module) else None
            inside = f"{path}."
        yield from (_Place(layer, module, name) for name in module._parameters)


@contextmanager
def _swapped(values: list[tuple[_Place, Tensor]]) -> Iterator[None]:
    """Put values into places for the duration of a block."""
    before = [place.module._parameters[place.name] for place, _ in values]
    try:
        for place, value in values:
            place.module._parameters[place.name] = value  # type: ignore[assignment]
        yield
    finally:
        for (place, _), own in zip(values, before, strict=True):
            place.module._parameters[place.name] = own


@contextmanager
def _swapped_while_running(layer: nn.Module, values: list[tuple[_Place, Tensor]]) -> Iterator[None]:
    """Put values into places whenever a layer runs, for the duration of a block."""
    running: list[Any] = []

    def enter(*_: Any) -> None:
        running.append(_swapped(values))
        running[-1].__enter__()

    def leave(*_: Any) -> None:
        running.pop().__exit__(None, None, None)

    with layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave, always_call=True):
        yield
