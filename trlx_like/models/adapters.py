"""LoRA and its kin: few trained weights beside a frozen model, by peft.

peft puts its layers into the model where it stands, so a model with an adapter is the family's own class still, and
whatever works on a model works on it. Left out on purpose: prompt tuning, which is not a part of layers, and AdaLoRA,
which wants to be told of every step.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.peft_utils import find_adapter_config_file

from trlx_like.errors import ConfigError
from trlx_like.imports import install_hint
from trlx_like.registry import nearest

logger = logging.getLogger(__name__)

OPTION = "model.peft_config"
KINDS = ("LORA", "IA3", "LOHA", "LOKR")
"""Values of `peft_type` that are tested."""

Model = TypeVar("Model", bound=nn.Module)

_NAME = "default"  # peft's own name for the only adapter of a model


def import_peft() -> Any:
    """The module. ConfigError names the extra where it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise ConfigError(f"{OPTION}: adapters need peft ({error}): {install_hint('peft')}.") from error
    return peft


def read_adapter(given: Any) -> Any:
    """`model.peft_config`, a `PeftConfig` or a mapping with its options and `peft_type`, as a `PeftConfig` of its own.

    ConfigError for kinds that cannot be trained here, and for options that the kind does not have.
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
    try:
        return kinds[kind](**{**given, "peft_type": kind})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{OPTION}: {error}") from error


def _kind(value: Any) -> str:
    return str(getattr(value, "value", value)).upper()


def has_adapter(lm: nn.Module) -> bool:
    return bool(getattr(lm, "_hf_peft_config_loaded", False))


def add_adapter(lm: PreTrainedModel, given: Any, source: str | None) -> None:
    """Puts a new adapter into a model. From then on only the adapter is trained.

    given: as `read_adapter`. source: where the model can be loaded from again (None: nowhere), which the adapter's own
    folder has to say. Random numbers of torch are drawn.
    """
    if has_adapter(lm):
        raise ConfigError(
            f"{OPTION}: model.model_path has an adapter already, which is trained on when {OPTION} is left out; for a "
            "new one, start from a folder that save_pretrained(..., merged=True) wrote."
        )
    config = read_adapter(given)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to False")  # of GPT-2; peft sets it right
            lm.add_adapter(config, _NAME)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{OPTION} does not fit {type(lm).__name__}: {error}") from error
    if lm.config.is_encoder_decoder and not _shared(lm).isdisjoint(_adapted(lm)):
        raise ConfigError(
            f"{OPTION}: the embeddings of {type(lm).__name__} share a weight, so that an adapter on one of them could "
            "not be merged into the model; leave them out of target_modules and modules_to_save."
        )
    is_folder = source is not None and Path(source).is_dir()
    config.base_model_name_or_path = str(Path(source).resolve()) if source is not None and is_folder else source
    config.task_type = config.task_type or ("SEQ_2_SEQ_LM" if lm.config.is_encoder_decoder else "CAUSAL_LM")
    _say(lm)


def train_adapter(lm: PreTrainedModel) -> None:
    """Lets the adapter that a model came with be trained on, and nothing else."""
    if list(lm.peft_config) != [_NAME]:
        names = ", ".join(lm.peft_config)
        raise ConfigError(f"model.model_path has adapters named {names}; the only one must be {_NAME!r} to be trained.")
    lm.requires_grad_(False)
    lm.set_adapter(_NAME)
    for config in lm.peft_config.values():
        config.inference_mode = False
    _say(lm)


def _say(lm: PreTrainedModel) -> None:
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in lm.parameters()]
    trained, all_of_them = sum(n for n, trains in counts if trains), sum(n for n, _ in counts)
    logger.info("Training an adapter: %d of %d weights (%.2f %%).", trained, all_of_them, 100 * trained / all_of_them)


def unwrapped(model: Any) -> Any:
    """A `PeftModel`'s own model, with the adapter in it; any other model as it is."""
    if not hasattr(model, "peft_config") or isinstance(model, PreTrainedModel) or not hasattr(model, "get_base_model"):
        return model
    for config in model.peft_config.values():
        read_adapter(config)
    lm = model.get_base_model()
    lm.peft_config = model.peft_config
    lm._hf_peft_config_loaded = True  # what transformers' own add_adapter sets, so that it saves the adapter
    return lm


def base_of(path: str) -> str | None:
    """Where the model is that the adapter in a folder (or hub repository) is for; None if it holds no adapter."""
    try:
        found = find_adapter_config_file(path)
    except (OSError, ValueError):  # of a name that cannot be one, `from_pretrained` has more to say
        return None
    if found is None:
        return None
    import_peft()
    base: str | None = json.loads(Path(found).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if base is None:
        raise ConfigError(f"model.model_path ({path!r}): its adapter_config.json does not name the model it is for.")
    return base


def merged(lm: Model) -> Model:
    """A copy of a model with its adapter added into its weights: one without an adapter that says the same.

    Of two layers that shared a weight, and of which an adapter changes one, each has its own.
    """
    whole: Any = copy.deepcopy(lm)
    shared = _shared(whole)
    for name, module in list(whole.named_modules()):
        if _adapts(module):
            for owner, own in _held(module):
                if owner._parameters[own] in shared:
                    owner._parameters[own] = nn.Parameter(owner._parameters[own].detach().clone())
            whole.set_submodule(name, _merge(module))
    if shared and not _shared(whole):
        whole.config.get_text_config().tie_word_embeddings = whole.config.tie_word_embeddings = False
    whole._hf_peft_config_loaded = False
    del whole.peft_config
    return cast(Model, whole)


def _held(model: nn.Module) -> list[tuple[Any, str]]:
    """The modules that hold a weight, and their names for it."""
    return [
        (module, name) for module in model.modules() for name, value in module._parameters.items() if value is not None
    ]


def _shared(model: nn.Module) -> set[Tensor]:
    """Weights that several modules hold."""
    uses = Counter(module._parameters[name] for module, name in _held(model))
    return {weight for weight, count in uses.items() if count > 1}


def _adapted(lm: nn.Module) -> set[Tensor]:
    """Weights of the model's own modules that an adapter is for."""
    return {m._parameters[name] for module in lm.modules() if _adapts(module) for m, name in _held(module)}


def leave_out_frozen(model: nn.Module, part: nn.Module) -> None:
    """Gives a model a state without the frozen weights of a part: they are where that was loaded from.

    Those of other parts, such as ILQL's target heads, are the run's own.
    """
    known = {id(value) for value in part.parameters() if not value.requires_grad}
    frozen = {name for name, value in model.named_parameters(remove_duplicate=False) if id(value) in known}

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        for name in list(state):
            if name.removeprefix(prefix) in frozen:
                del state[name]

    def ignore(module: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in frozen]

    model.register_state_dict_post_hook(drop)
    model.register_load_state_dict_post_hook(ignore)


def plain_weights(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of a model with its adapter, if any, added into them: those of `merged`, under their names there.

    The model stays as it is; one layer of it is copied at a time. What several layers share comes once.
    """
    if not has_adapter(lm):
        yield from ((name, weight.detach()) for name, weight in lm.named_parameters())
        return
    inside, seen = "", set[Tensor]()
    for path, module in lm.named_modules():
        if inside and path.startswith(inside):
            continue
        inside = f"{path}." if _adapts(module) else ""
        if inside:
            own = dict(_merge(copy.deepcopy(module)).named_parameters())
        else:
            own = {name: weight for name, weight in module.named_parameters(recurse=False) if weight not in seen}
            seen.update(own.values())
        yield from ((f"{path}.{name}".removeprefix("."), weight.detach()) for name, weight in own.items())


def mismerged_weights(lm: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    """What the weights with an adapter would be if it were left out, and if it were added twice: name, cause, weight.

    For telling what went wrong with a copy of the model.
    """
    for path, module in lm.named_modules() if has_adapter(lm) else ():
        if _adapts(module) and hasattr(module, "get_base_layer"):
            once, twice = copy.deepcopy(module), copy.deepcopy(module)
            twice.get_base_layer().load_state_dict(_merge(once).state_dict())
            for cause, own in (
                ("without the adapter", module.get_base_layer()),
                ("with the adapter twice", _merge(twice)),
            ):
                yield from ((f"{path}.{name}", cause, weight.detach()) for name, weight in own.named_parameters())


def _adapts(module: nn.Module) -> bool:
    """Whether an adapter has put this module in the place of one of the model's own."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    return isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)


def _merge(module: Any) -> nn.Module:
    """The model's own module, with the adapter's part added into it in place."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not isinstance(module, BaseTunerLayer):  # trained as a whole
        own: nn.Module = module.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        return own
    module.merge()
    return module.get_base_layer()


class AdapterWeights(nn.Module):
    """A frozen copy of what is trained of a model, that can stand in for it."""

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        held = [(module, name, value) for module in lm.modules() for name, value in module._parameters.items()]
        trained = [(module, name, value) for module, name, value in held if value is not None and value.requires_grad]
        # In a list, so that the model is not a part of this one.
        self._places = [[(module, name) for module, name, _ in trained]]
        self.frozen = nn.ParameterList([value.detach().clone() for *_, value in trained]).requires_grad_(False)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model is what it was when this copy was made. What was computed before keeps its gradient."""
        before = [(module, name, module._parameters[name]) for module, name in self._places[0]]
        try:
            for (module, name, _), value in zip(before, self.frozen, strict=True):
                module._parameters[name] = value
            yield
        finally:
            for module, name, value in before:
                module._parameters[name] = value
