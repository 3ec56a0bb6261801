"""Makes the trainer of a run with random weights and without its data, to see what the run would take."""

from __future__ import annotations

import math
from typing import Any

from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast

from trlx_like.check import never_called
from trlx_like.config import TRAINERS, TRLConfig
from trlx_like.errors import ConfigError
from trlx_like.imports import is_python_name
from trlx_like.models.sources import UNLOADABLE, UNTRUSTED, cannot_load

DATA = {
    "prompts": ["a", "a"],  # two, as a permutation of tensors without values is all ones
    "samples": [("a", "a")],
    "rewards": [1.0],
    "preferences": [{"prompt": "a", "chosen": "a", "rejected": "aa"}],
}


def make_rehearsal(config: TRLConfig, folder: str, gpus: int = 1) -> Any:
    """Make the trainer of a run with random weights and without its data; one process of several.

    Args:
        config: The complete configuration.
        folder: An empty folder, in place of that of the run.
        gpus: Number of processes.
    """
    train = config.train
    local = math.ceil(train.batch_size / gpus)
    own: dict[str, Any] = {"checkpoint_dir": folder, "resume_from_checkpoint": None, "batch_size": local}
    own |= {"minibatch_size": min(train.minibatch_size or local, local), "tracker": None, "rollout_logging_dir": None}
    own |= {"keep_trunk": False}
    changes: dict[str, Any] = {"train": own, "model": {"quantization": None}}
    totals = {name: getattr(config.method, name, None) for name in ("num_rollouts", "num_prompts")}
    changes["method"] = {name: max(1, total // gpus) for name, total in totals.items() if total is not None}
    if getattr(config.method, "formatting_func", None) is not None:
        changes["method"]["formatting_func"] = None
    changed = config.evolve(**changes)
    changed.backend = config.backend.undivided()
    for option in ("model_path", "ref_model_path"):
        setattr(changed.model, option, _shapes(getattr(config.model, option), config, f"model.{option}"))
    kind: Any = TRAINERS.get(train.trainer)
    needs = " ".join(kind.needs)
    data = {name: rows for name, rows in DATA.items() if name in kind.uses}
    functions = {"reward_fn": never_called} if "reward_fn" in needs else {}
    return kind(changed, tokenizer=_tokenizer(), **functions, **train.trainer_kwargs, **data)


def _shapes(path: Any, config: TRLConfig, option: str) -> Any:
    """Return the configuration of a model in place of its weights; None stays None."""
    if config.model.model_arch_type == "diffusion":
        raise ConfigError(f"estimate: {config.train.trainer} trains a diffusion model, whose memory is not estimated.")
    if path is None or not isinstance(path, str):
        return getattr(path, "config", path)
    if is_python_name(path):
        raise ConfigError(f"estimate: {option} ({path}) is a function; name a folder with a config.json.")
    try:
        return AutoConfig.from_pretrained(path, **UNTRUSTED)
    except UNLOADABLE as error:
        raise cannot_load(option, repr(path), error, "model.model_extra_configs") from error


def _tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of three tokens: text is not looked at, only the length of sequences."""
    vocabulary = {"<eos>": 0, "a": 1, "<pad>": 2}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", unk_token="a", pad_token="<pad>")
