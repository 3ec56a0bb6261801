"""Loads models that `model.model_path` names, and checks them without their weights."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PretrainedConfig, PreTrainedModel

from trlx_like.config import ModelConfig
from trlx_like.errors import ConfigError
from trlx_like.imports import called_by_name, is_python_name
from trlx_like.models.adapters import add_adapter, base_of, log_trained, read_adapter, train_adapter, unwrapped
from trlx_like.models.causality import require_causal, warn_of_padding
from trlx_like.models.faster import faster
from trlx_like.models.finite import require_finite
from trlx_like.models.formats import check_formats, check_in_memory, load_options, prepare_quantized, require_adapter
from trlx_like.models.layout import check_has_lm_head
from trlx_like.models.merging import has_adapter
from trlx_like.models.sources import UNLOADABLE, UNTRUSTED, check_place, loadable, no_progress_bars, shown
from trlx_like.models.unread import lowest_blocks, read_buffers, reads_weights, unread_weights, why_read

logger = logging.getLogger(__name__)

MODEL = "model.model_path"


def check_model(config: ModelConfig) -> None:
    """Raise ConfigError for an adapter or a number format that cannot be trained, before a model is loaded."""
    if config.peft_config is not None:
        read_adapter(config.peft_config)
    if config.model_arch_type != "diffusion":
        check_formats(config)


def load_trained_model(config: ModelConfig, unread: bool = False) -> PreTrainedModel:
    """Load the model that is to be trained, with a trainable adapter if there is one.

    There is one if `model.peft_config` asks for a new one, or if `model.model_path` comes with one, which is then
    trained further. Then all other weights are frozen.

    Args:
        config: The section `model`.
        unread: As for `load_model`.

    Returns:
        The model.

    Raises:
        ConfigError: If it cannot be loaded or trained, or is of another kind than `model.model_arch_type`.
    """
    check_model(config)
    path = called_by_name(config.model_path, MODEL)
    lm = load_model(path, config, unread=unread and not reads_weights(config.peft_config))
    if config.peft_config is not None:
        add_adapter(lm, config.peft_config, path if isinstance(path, str) else None)
    elif has_adapter(lm):
        train_adapter(lm)
    require_adapter(lm, has_adapter(lm))
    if has_adapter(lm):
        log_trained(lm)
    return lm


def load_model(path: Any, config: ModelConfig, option: str = MODEL, unread: bool = False) -> PreTrainedModel:
    """Load a language model in the format that `model.dtype` and `model.quantization` say.

    Args:
        path: A folder or hub name of a model or of an adapter, a `PretrainedConfig` (random weights), a model (used as
            it is), or `module:function` that returns one of these.
        config: The section `model`.
        option: The name of the option in errors.
        unread: Leave weights in their files, as `Unread` parameters, if they are in files of safetensors.

    Returns:
        The model.

    Raises:
        ConfigError: If it cannot be loaded, lacks weights, has NaN or infinite ones, is not causal, or is of another
            kind than `model.model_arch_type`.
    """
    path = unwrapped(called_by_name(path, option))
    place = f"{option} ({shown(path)})"
    if isinstance(path, PreTrainedModel):
        _check_kind(path.config, config, type(path).__name__)
        check_has_lm_head(path)
        check_in_memory(path, config)
        lm = path
    else:
        if isinstance(path, str) and Path(path).is_dir():
            inspect_model(path, config, option)  # before memory is filled with what turns out to be random
        lm = _left_unread(path, config, option) if unread else _loaded(path, config, option)
        prepare_quantized(lm, config)
    require_finite(lm, place)
    if config.model_arch_type == "causal":
        lowest = lowest_blocks(lm, 1)
        require_causal(lowest, place)
        warn_of_padding(lowest, place)
    return faster(lm)


def _left_unread(path: Any, config: ModelConfig, option: str) -> PreTrainedModel:
    """Load a model whose weights stay in their files; where that cannot be, say why and read them."""
    if isinstance(path, PretrainedConfig) or config.quantization is not None or base_of(path) is not None:
        why: str | None = "its weights are random, quantized or those of an adapter"
    else:
        with unread_weights():
            lm = _loaded(path, config, option)
        read_buffers(lm)
        if (why := why_read(lm)) is None:
            return lm
        del lm
    logger.info("Every process reads all weights of %s (%s), and then drops what it does not hold.", shown(path), why)
    return _loaded(path, config, option)


def _loaded(path: Any, config: ModelConfig, option: str, quantized: bool = True, **more: Any) -> PreTrainedModel:
    """Load a model, or make one of a configuration; `more` goes to `from_pretrained`."""
    extra = {**UNTRUSTED, **load_options(config, path, quantized), **more}
    kind: Any = AutoModelForSeq2SeqLM if config.model_arch_type == "seq2seq" else AutoModelForCausalLM
    with loadable(path, option, "model.model_extra_configs"):
        if isinstance(path, PretrainedConfig):
            found = path
        else:
            check_place(str(path), option)
            found = _read_config(str(path), extra, option)
        _check_kind(found, config, shown(path))
        return read_model(kind, path, option, extra)


def read_model(
    kind: Any, path: Any, option: str, extra: Mapping[str, Any], new: tuple[str, ...] = ()
) -> PreTrainedModel:
    """Read a model by its class, or make one of a configuration with random weights.

    Args:
        kind: The class of transformers, such as `AutoModelForCausalLM`.
        path: A folder or hub name, or a `PretrainedConfig`.
        option: The name of the option in errors.
        extra: Arguments of `from_pretrained` or `from_config`.
        new: As for `check_complete`.

    Raises:
        ConfigError: If the files do not have all weights.
    """
    if isinstance(path, PretrainedConfig):
        return cast(PreTrainedModel, kind.from_config(path, **extra))
    with no_progress_bars():
        lm, found = kind.from_pretrained(
            str(path), output_loading_info=True, **{"ignore_mismatched_sizes": True, **extra}
        )
    check_complete(found, f"{option} ({shown(path)})", extra.get("ignore_mismatched_sizes", False), new)
    return cast(PreTrainedModel, lm)


def _read_config(path: str, extra: Mapping[str, Any], option: str) -> PretrainedConfig:
    """Read the configuration of a model, or of the model that an adapter is for."""
    base = base_of(path)
    if base is not None:
        check_place(base, f"{option} ({path!r}): the model of the adapter")
    return cast(PretrainedConfig, AutoConfig.from_pretrained(base or path, **extra))


def inspect_model(path: Any, config: ModelConfig, option: str = MODEL) -> PretrainedConfig | None:
    """Check a model by its configuration and the headers of its files, without reading a weight or using the network.

    Args:
        path: As in `load_model`.
        config: The section `model`.
        option: The name of the option in errors.

    Returns:
        The configuration of the model; None if that is not known, because a function makes the model or it is not on
        this machine.

    Raises:
        ConfigError: As `load_model`, for what can be known without the weights.
    """
    path, extra, local = unwrapped(path), {**UNTRUSTED, **config.model_extra_configs}, {"local_files_only": True}
    found = within_reach(path, option, {**extra, **local})
    if isinstance(found, PretrainedConfig):
        _check_kind(found, config, shown(path))
    if not isinstance(found, str):
        return found
    if base_of(path) is None and not _quantized(path, extra):  # layers of bitsandbytes take no headers
        lm = _loaded(path, config, option, quantized=False, device_map="meta", **local)
        if option == MODEL and config.peft_config is not None:
            with torch.random.fork_rng([]):
                add_adapter(lm, config.peft_config, None)
        return lm.config
    with loadable(path, option, "model.model_extra_configs"):
        return _read_config(path, {**extra, **local}, option)


def positions_of(config: ModelConfig) -> int | None:
    """Return the number of positions of a model, without reading a weight or using the network.

    Args:
        config: The section `model`.

    Returns:
        The number; None if the model has no limit, a function makes it, or it is not on this machine.

    Raises:
        ConfigError: If files of the model are damaged.
    """
    path, extra = unwrapped(config.model_path), {**UNTRUSTED, **config.model_extra_configs, "local_files_only": True}
    found = within_reach(path, MODEL, extra)
    if isinstance(found, str):
        with loadable(path, MODEL, "model.model_extra_configs"):
            found = _read_config(path, extra, MODEL)
    return None if found is None else getattr(found.get_text_config(), "max_position_embeddings", None)


def within_reach(path: Any, option: str, extra: Mapping[str, Any]) -> PretrainedConfig | str | None:
    """Find out what is known of a model without a network.

    Args:
        path: As in `load_model`.
        option: The name of the option in errors.
        extra: Arguments of `from_pretrained`.

    Returns:
        The configuration of a model in memory, or the path of one whose files are on this machine; None otherwise.

    Raises:
        ConfigError: If files of the model are damaged.
    """
    if isinstance(path, PreTrainedModel | PretrainedConfig):
        return path.config if isinstance(path, PreTrainedModel) else path
    if not isinstance(path, str) or is_python_name(path):
        return None
    check_place(path, option)
    if not Path(path).is_dir():
        try:
            AutoConfig.from_pretrained(path, **extra)
        except UNLOADABLE:
            return None
    return path


def _quantized(path: str, extra: Mapping[str, Any]) -> bool:
    """Tell whether a model is quantized in its files, or by further arguments of `from_pretrained`."""
    if "quantization_config" in extra:
        return True
    try:
        return hasattr(AutoConfig.from_pretrained(path, **{**extra, "local_files_only": True}), "quantization_config")
    except UNLOADABLE:
        return False  # the loading itself says what is wrong


def check_complete(found: Mapping[str, Any], place: str, may_differ: bool = False, new: tuple[str, ...] = ()) -> None:
    """Check what transformers reports about the weights that it has loaded.

    Args:
        found: The report: names of missing weights, and of those of another shape.
        place: The option and path of the model, for errors.
        may_differ: Accept weights of another shape, as `ignore_mismatched_sizes` asks for.
        new: Beginnings of the names of weights that may be missing, because they are made new.

    Raises:
        ConfigError: If the files lack weights, such as the language model head if they hold a classifier, or have
            weights of other shapes than the configuration says.
    """
    if missing := [name for name in found["missing_keys"] if not name.startswith(new)]:
        why = "it is another kind of model, and what it lacks would be random."
        if any(name.startswith("base_model.") for name in found.get("unexpected_keys", ())):
            why = "its weights have trlX's names; `trlx-like migrate FOLDER --to NEW_FOLDER` gives them transformers'."
        raise ConfigError(f"{place} has no {min(missing)}{_and_more(missing)}: {why}")
    if found["mismatched_keys"] and not may_differ:
        name, saved, wanted = min(found["mismatched_keys"])
        raise ConfigError(
            f"{place}: {name}{_and_more(found['mismatched_keys'])} has the shape {list(saved)} in its file and "
            f"{list(wanted)} by its config.json, which is of another model."
        )


def _and_more(names: Collection[Any]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def arch_type(path: str) -> Literal["causal", "seq2seq"]:
    """Tell which `model.model_arch_type` a saved model has.

    Args:
        path: A folder or hub name of a model or of an adapter.

    Returns:
        "causal" or "seq2seq".

    Raises:
        ConfigError: If it holds no model.
    """
    check_place(path, MODEL)
    with loadable(path, MODEL):
        return _kind(AutoConfig.from_pretrained(base_of(path) or path, **UNTRUSTED))


def _kind(config: PretrainedConfig) -> Literal["causal", "seq2seq"]:
    """Tell the `model.model_arch_type` of a model's configuration."""
    return "seq2seq" if config.is_encoder_decoder else "causal"


def _check_kind(found: PretrainedConfig, config: ModelConfig, name: str) -> None:
    """Raise ConfigError for a model of the other kind. Some families would load, with half of their weights random."""
    kind = _kind(found)
    if kind != config.model_arch_type:
        what = "an encoder-decoder" if kind == "seq2seq" else "no encoder-decoder"
        raise ConfigError(f"model.model_arch_type ({config.model_arch_type!r}): {name} is {what}; set it to {kind!r}.")
    saved = (found.architectures or [""])[0]
    if kind == "causal" and saved.endswith("ForMaskedLM") and not getattr(found, "is_decoder", False):
        raise ConfigError(
            f"{MODEL} ({name}) holds {saved}, which is not causal: it would see the tokens that it learns to predict. "
            "Use a causal language model."
        )


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Make a model recompute activations in the backward pass, which saves memory and costs time."""
    # transformers 6 renames the method, and the old name warns from 5.23 on.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    model.disable_input_require_grads()  # or the backward pass would go on through frozen blocks, for nothing
