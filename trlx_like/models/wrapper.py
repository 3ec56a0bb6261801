"""A language model with heads, under the names of TRL and trlX: how it is loaded, saved, named and generated from.

What the heads are, and what a forward pass returns, is in the classes that derive from it.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForSeq2SeqLM, BitsAndBytesConfig, PreTrainedModel
from transformers.utils.hub import PushToHubMixin

from trlx_like.errors import ConfigError
from trlx_like.imports import needed
from trlx_like.models.adapters import add_adapter, import_peft, train_adapter, unwrapped
from trlx_like.models.formats import prepare_quantized
from trlx_like.models.layout import check_has_lm_head, is_encoder_decoder
from trlx_like.models.loading import check_complete
from trlx_like.models.merging import has_adapter
from trlx_like.models.saved_heads import HEADS_FILE, read_heads
from trlx_like.models.sources import no_progress_bars

_KBIT = ("use_gradient_checkpointing", "gradient_checkpointing_kwargs")
"""Options of `peft.prepare_model_for_kbit_training`."""
_LM = "pretrained_model."


class PreTrainedModelWrapper(nn.Module, PushToHubMixin):
    """Hold a language model, `pretrained_model`, and heads on its hidden states.

    Names in the state dict are those of the language model, and those of the heads with the name of their attribute.

    Args:
        pretrained_model: The language model, or a `PeftModel` around it.
        others: None; options that are not known are refused, with the reason if they are TRL's or trlX's.

    Raises:
        ConfigError: For a causal model where an encoder-decoder is expected, or the other way round.
    """

    kind: ClassVar[Any]
    """The class of transformers that loads the model."""
    head_prefix: ClassVar[str]
    """Beginning of the names of the heads' weights in a state dict, such as "v_head."."""
    saved_prefix: ClassVar[str]
    """What stands in its place in the heads file, such as "heads.value."."""
    head_options: ClassVar[tuple[str, ...]] = ()
    """Names of the options of the constructor, which `from_pretrained` and `from_config` take as well."""
    refused: ClassVar[Mapping[str, str]] = {"output_loading_info": "weights that are missing are an error"}
    """Options of the classes with these names in TRL and trlX that are not taken, with the reason."""

    def __init__(self, pretrained_model: Any, **others: Any) -> None:
        super().__init__()
        self._split(others)  # names those that are refused
        if others:
            raise ConfigError(f"{type(self).__name__} takes no {', '.join(others)}; from_pretrained may.")
        lm = unwrapped(pretrained_model)
        if not isinstance(lm, PreTrainedModel):
            raise ConfigError(f"{type(self).__name__} needs a model of transformers, not a {type(lm).__name__}.")
        if is_encoder_decoder(lm) != (self.kind is AutoModelForSeq2SeqLM):
            raise ConfigError(f"{type(self).__name__}: {type(lm).__name__} is a model of the other kind.")
        check_has_lm_head(lm)
        self.pretrained_model = lm
        self.register_state_dict_post_hook(_shorten)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_lengthen)  # type: ignore[no-untyped-call]

    # Loading.

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *model_args: Any, **kwargs: Any) -> Self:
        """Load a model, and its heads if they were saved with it.

        Args:
            pretrained_model_name_or_path: A folder or hub name of a model or an adapter; or a model in memory, in a
                `PeftModel` or not.
            model_args: Passed to `from_pretrained` of transformers.
            kwargs: Options of the heads; `peft_config`, for a new adapter; `is_trainable`, to train the adapter that is
                loaded (it is frozen otherwise); `reward_adapter` and `reward_adapter_name`; `load_in_8bit` or
                `load_in_4bit`, and the options of `peft.prepare_model_for_kbit_training`. All others go to
                `from_pretrained` of transformers.

        Returns:
            The model with its heads. Without saved heads, new ones are made.

        Raises:
            ConfigError: If an option cannot be followed, or weights of the model are missing.
        """
        path = pretrained_model_name_or_path
        heads, adapters, options = cls._split(kwargs)
        saved: tuple[Mapping[str, Tensor], str] = {}, ""
        if isinstance(path, str | Path):
            options |= _quantization(options)
            with no_progress_bars():
                lm, found = cls.kind.from_pretrained(str(path), *model_args, output_loading_info=True, **options)
            check_complete(found, f"{cls.__name__} ({str(path)!r})", options.get("ignore_mismatched_sizes", False))
            saved = read_heads(path, cls.head_prefix, options)
        else:
            if options or model_args:
                raise ConfigError(
                    f"{cls.__name__}.from_pretrained: {', '.join(options) or model_args} cannot change a model in "
                    "memory; load it with these options, or give its path."
                )
            lm = unwrapped(path)
        return cls._made(lm, heads, adapters, saved, str(path) if isinstance(path, str | Path) else None)

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Self:
        """Make a model with random weights.

        Args:
            config: The configuration of the language model.
            kwargs: As for `from_pretrained`; those that are not for heads and adapters go to `from_config` of
                transformers.
        """
        heads, adapters, options = cls._split(kwargs)
        return cls._made(cls.kind.from_config(config, **options), heads, adapters, ({}, ""), None)

    @classmethod
    def _split(cls, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Divide keywords into those of the heads, those of adapters, and those of transformers."""
        for name, why in cls.refused.items():
            if name in kwargs:
                raise ConfigError(f"{cls.__name__}: {name} is not taken: {why}.")
        names = {"peft_config", "is_trainable", "reward_adapter", "reward_adapter_name", *_KBIT}
        heads = {name: value for name, value in kwargs.items() if name in cls.head_options}
        adapters = {name: value for name, value in kwargs.items() if name in names}
        return heads, adapters, {k: v for k, v in kwargs.items() if k not in heads and k not in adapters}

    @classmethod
    def _made(
        cls,
        lm: PreTrainedModel,
        heads: Mapping[str, Any],
        adapters: Mapping[str, Any],
        saved: tuple[Mapping[str, Tensor], str],
        path: str | None,
    ) -> Self:
        """Add adapters and heads to a language model."""
        prepare_quantized(lm)
        kbit = {name: adapters[name] for name in _KBIT if name in adapters}
        if kbit and not (getattr(lm, "is_quantized", False) and adapters.get("peft_config") is not None):
            raise ConfigError(f"{', '.join(kbit)}: these prepare a quantized model for a new adapter (peft_config).")
        if adapters.get("peft_config") is not None:
            if getattr(lm, "is_quantized", False):
                import_peft().prepare_model_for_kbit_training(lm, **kbit)
            add_adapter(lm, adapters["peft_config"], path)
        elif has_adapter(lm) and adapters.get("is_trainable"):
            train_adapter(lm)
        model = cls(lm, **heads)
        model.load_heads(*saved)
        if adapters.get("reward_adapter") is not None:
            add: Any = getattr(model, "add_and_load_reward_modeling_adapter", None)
            if add is None:
                raise ConfigError(f"{cls.__name__}: a model with these heads takes no reward_adapter.")
            add(adapters["reward_adapter"], adapters.get("reward_adapter_name", "reward_model_adapter"))
        return model

    @abstractmethod
    def load_heads(self, saved: Mapping[str, Tensor], file: str) -> None:
        """Load the heads.

        Args:
            saved: The weights of a file, with the names of it; none if no heads were saved with the model.
            file: The name of the file, for errors.
        """

    # Saving.

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Save the model, which plain transformers can load, and the heads in a file of their own.

        Args:
            save_directory: The folder.
            kwargs: Passed to `save_pretrained` of transformers, such as `max_shard_size`. A `state_dict` may have the
                names of this model's own.

        Raises:
            ConfigError: For options that cannot be followed.
        """
        if not kwargs.pop("safe_serialization", True):
            raise ConfigError("safe_serialization=False: weights are written as safetensors only.")
        if kwargs.pop("push_to_hub", False):
            raise ConfigError("push_to_hub=True would leave the heads behind; call push_to_hub(repo_id).")
        known = inspect.signature(PreTrainedModel.save_pretrained).parameters
        if unknown := [name for name in kwargs if name not in known]:
            raise ConfigError(f"save_pretrained takes no {', '.join(unknown)}.")
        saved = getattr(self, self.head_prefix.rstrip(".")).state_dict()
        heads = {f"{self.saved_prefix}{name}": value for name, value in saved.items()}
        if (given := kwargs.pop("state_dict", None)) is not None:
            own = {name: value for name, value in given.items() if name.startswith(self.head_prefix)}
            kwargs["state_dict"] = {name: value for name, value in given.items() if name not in own}
            heads |= {name.replace(self.head_prefix, self.saved_prefix, 1): value for name, value in own.items()}
        with no_progress_bars():
            self.pretrained_model.save_pretrained(save_directory, **kwargs)
        if kwargs.get("is_main_process", True):
            contiguous = {name: value.detach().contiguous() for name, value in heads.items()}
            save_file(contiguous, Path(save_directory) / HEADS_FILE)

    # The language model's own.

    @property
    def config(self) -> Any:
        """The configuration of the language model."""
        return self.pretrained_model.config

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the language model: arguments and result are those of `generate()` of transformers."""
        return self.pretrained_model.generate(*args, **kwargs)  # type: ignore[operator]

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Recompute activations of the language model in the backward pass, which saves memory and costs time."""
        lm: Any = self.pretrained_model  # transformers 6 renames the method
        getattr(lm, "activation_checkpointing_enable", lm.gradient_checkpointing_enable)(*args, **kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Keep activations of the language model again."""
        lm: Any = self.pretrained_model
        getattr(lm, "activation_checkpointing_disable", lm.gradient_checkpointing_disable)()


def _quantization(options: dict[str, Any]) -> dict[str, Any]:
    """Take `load_in_8bit` and `load_in_4bit` out of the options, and return what transformers calls them."""
    asked = {name: True for name in ("load_in_8bit", "load_in_4bit") if options.pop(name, False)}
    if not asked:
        return {}
    with needed(f"{next(iter(asked))} needs bitsandbytes", "bitsandbytes"):
        import bitsandbytes  # noqa: F401
    return {"quantization_config": BitsAndBytesConfig(**asked)}


def _shorten(module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Name the weights of the language model in a state dict as they are named in it."""
    for name in [name for name in state if name.startswith(prefix + _LM)]:
        state[prefix + name.removeprefix(prefix + _LM)] = state.pop(name)


def _lengthen(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Undo `_shorten` before a state dict is loaded."""
    heads = tuple(f"{prefix}{name}." for name, _ in module.named_children() if f"{name}." != _LM)
    for name in [name for name in state if name.startswith(prefix) and not name.startswith((prefix + _LM, *heads))]:
        state[prefix + _LM + name.removeprefix(prefix)] = state.pop(name)
