"""Makes `import trlx` work: after `import trlx_like.compat.trlx`, trlX's modules have the names of this package.

`train` and the methods of trainers take trlX's arguments. What trlX has and this package does not have raises an
ImportError that says what to use. Nothing of trlX itself is installed or run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trlx_like import api
from trlx_like.config import TRLConfig

if TYPE_CHECKING:
    from torch import Tensor

_CONFIGS = {
    name: f"config:{name}"
    for name in ["TRLConfig", "ModelConfig", "TokenizerConfig", "OptimizerConfig", "SchedulerConfig", "TrainConfig"]
}
_METHODS = {name: f"config:{name}" for name in ("PPOConfig", "ILQLConfig", "SFTConfig", "RFTConfig")}
_BASE = {"MethodConfig": "config:MethodConfig", "register_method": "config:register_method"}
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

MODULES: dict[str, dict[str, str]] = {
    "trlx": {"train": "compat.trlx:train", "logging": "=trlx.utils.logging:"},
    "trlx.trlx": {"train": "compat.trlx:train"},
    "trlx.data": {},
    "trlx.data.configs": {
        **_CONFIGS,
        "MethodConfig": "config:MethodConfig",
        "get_method": "config.registries:method_class",
    },
    "trlx.data.default_configs": {
        **_CONFIGS,
        **_METHODS,
        **{f"default_{name}_config": f"presets:default_{name}_config" for name in ("ppo", "ilql", "sft")},
    },
    "trlx.data.method_configs": {**_BASE, **_METHODS, "get_method": "config.registries:method_class"},
    "trlx.data.ppo_types": dict.fromkeys(("PPORLElement", "PPORLBatch"), "trainers.ppo:PPOExperience"),
    "trlx.data.ilql_types": dict.fromkeys(("ILQLElement", "ILQLBatch"), "trainers.ilql:ILQLExperience"),
    "trlx.models": {},
    "trlx.models.modeling_base": {"PreTrainedModelWrapper": "models.wrapper:PreTrainedModelWrapper"},
    "trlx.models.modeling_ppo": {
        "PPOConfig": "config:PPOConfig",
        "AutoModelForCausalLMWithValueHead": "models.value_head:AutoModelForCausalLMWithValueHead",
        "AutoModelForSeq2SeqLMWithValueHead": "models.value_head:AutoModelForSeq2SeqLMWithValueHead",
    },
    "trlx.models.modeling_ilql": {
        "ILQLConfig": "config:ILQLConfig",
        "ILQLHeads": "models.heads:ILQLHeads",
        "AutoModelForCausalLMWithILQLHeads": "samplers.guided:AutoModelForCausalLMWithILQLHeads",
        "AutoModelForSeq2SeqLMWithILQLHeads": "samplers.guided:AutoModelForSeq2SeqLMWithILQLHeads",
    },
    "trlx.pipeline": {"register_datapipeline": "pipelines.prompts:register_datapipeline"},
    "trlx.pipeline.offline_pipeline": {"PromptPipeline": "pipelines.prompts:PromptPipeline"},
    "trlx.pipeline.ppo_pipeline": {"PPORolloutStorage": "data:RolloutStore"},
    "trlx.trainer": {"BaseRLTrainer": "trainers.base:BaseRLTrainer", "register_trainer": "config:register_trainer"},
    "trlx.trainer.accelerate_base_trainer": {"AccelerateRLTrainer": "trainers.text:TextTrainer"},
    **{
        f"trlx.trainer.accelerate_{name.lower()}_trainer": {
            f"{name}Config": f"config:{name}Config",
            f"Accelerate{name}Trainer": f"trainers.{name.lower()}:{name}Trainer",
        }
        for name in ("PPO", "ILQL", "SFT", "RFT")
    },
    "trlx.utils": {"set_seed": "checkpoint:seed_everything"},
    "trlx.utils.loading": {"get_trainer": "config:TRAINERS.get", "get_pipeline": "pipelines.prompts:DATAPIPELINES.get"},
    "trlx.utils.modeling": {},
    "trlx.utils.logging": {
        "get_logger": "compat.trlx:get_logger",
        "set_verbosity": "compat.trlx:set_verbosity",
        **{f"set_verbosity_{level.lower()}": f"compat.trlx:set_verbosity {level}" for level in _LEVELS},
        **{level: f"=logging:{level}" for level in _LEVELS},
    },
}
"""trlX's modules: name in trlX -> "module:attribute" in this package."""

GONE = {
    "AdaptiveKLController": "set method.target, method.horizon and method.init_kl_coef",
    "AutoModelForCausalLMWithHydraValueHead": "the trainer adds the reference (model.num_layers_unfrozen)",
    "AutoModelForSeq2SeqLMWithHydraValueHead": "the trainer adds the reference (model.num_layers_unfrozen)",
    "BasePipeline": "a pipeline is any class with __len__ and __getitem__(rows), see trlx_like.pipelines.prompts",
    "BaseRolloutStore": "experience is kept in a trlx_like.data.RolloutStore",
    "DialogStore": "pass dialogues as samples; they are encoded by trlx_like.pipelines.dialogues.encode_dialogues",
    "FixedKLController": "set method.init_kl_coef, and method.target to null",
    "MiniBatchIterator": "set train.minibatch_size",
    "RunningMoments": "set method.scale_reward to running",
    "tokenize_dialogue": "use trlx_like.pipelines.dialogues.encode_dialogues",
    "whiten": "use trlx_like.functional.masked.whiten, which takes a mask",
}
"""Names of trlX that have no counterpart, with what to use."""

_MODULES_GONE = {
    "trlx.sweep": "`trlx-like sweep` runs a sweep file",
    "trlx.reference": "compare the metrics.jsonl of two runs",
    "trlx.trainer.nemo": "NeMo is not supported; use the trainers of trlx_like",
    "trlx.models.modeling_nemo": "NeMo is not supported; use the trainers of trlx_like",
}


def train(
    model_path: Any = None,
    reward_fn: Callable[..., Any] | None = None,
    dataset: Iterable[Any] | None = None,
    samples: Sequence[Any] | None = None,
    rewards: Sequence[Any] | None = None,
    prompts: Sequence[Any] | None = None,
    eval_prompts: Sequence[Any] | None = None,
    metric_fn: Callable[..., Any] | None = None,
    config: Any = None,
    stop_sequences: Sequence[str] | None = None,
) -> Any:
    """Train a model with the arguments of `trlx.train`, in trlX's order.

    Without prompts, text is generated from BOS alone, as often as `train.batch_size` says.

    Args:
        model_path, reward_fn, samples, rewards, prompts, eval_prompts, metric_fn, stop_sequences: as in
            `trlx_like.train`.
        dataset: the older form of `(samples, rewards)`.
        config: as in `trlx_like.train`. A `logit_mask` in `train.trainer_kwargs` is True where a token is forbidden.

    Returns:
        The trainer, whose methods take trlX's arguments, see `Calls`.

    Raises:
        TrlxError: as `trlx_like.train`.
    """
    if dataset is not None:
        samples, rewards = dataset
    data: dict[str, Any] = {"samples": samples, "rewards": rewards}
    complete = api.read_config(config, model_path=model_path, reward_fn=reward_fn, data=data)
    complete, allowed = _without_mask(complete)
    start = [""] * complete.train.batch_size  # which is encoded as BOS
    online = samples is None and complete.data.samples is None
    if online and prompts is None and complete.data.prompts is None:
        prompts = start
    if not online and eval_prompts is None and complete.data.eval_prompts is None:
        eval_prompts = start
    api.check_folder(complete)
    trainer = api.make_trainer(
        complete,
        reward_fn=reward_fn,
        metric_fn=metric_fn,
        stop_sequences=stop_sequences or None,
        logit_mask=allowed,
        prompts=prompts,
        eval_prompts=eval_prompts,
        **data,
    )
    trainer.__class__ = with_calls(type(trainer))
    trainer.learn()
    return trainer


def _without_mask(config: TRLConfig) -> tuple[TRLConfig, Tensor | None]:
    """Take trlX's `logit_mask` out of the trainer's keywords, and return the mask of what is allowed."""
    import torch

    values = config.to_dict()
    forbidden = values["train"]["trainer_kwargs"].pop("logit_mask", None)
    if forbidden is None:
        return config, None
    return TRLConfig.from_dict(values), ~torch.as_tensor(forbidden).bool()


class Calls:
    """Methods of a trainer with the arguments of trlX. Those of this package work too."""

    def generate(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Generate with the options of training.

        Args:
            input_ids: Prompt token ids, padded on the left. [B, P] Other queries are passed on as they are.
            attention_mask: 1 on real tokens; None is no padding. [B, P]
            kwargs: Generation options that override the configured ones.

        Returns:
            Prompts with their responses, padded on the right [B, P + R]; of an encoder-decoder, the decoder's tokens.
            For other queries, what the trainer's own `generate` returns.
        """
        return _whole(self, super().generate, input_ids, attention_mask, kwargs)  # type: ignore[misc]

    def generate_eval(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Generate with the options of evaluation; otherwise like `generate`."""
        return _whole(self, super().generate_eval, input_ids, attention_mask, kwargs)  # type: ignore[misc]

    def decode(self, prompts: Any, samples: Any = None, prompt_sizes: Any = None, **kwargs: Any) -> Any:
        """Decode prompts, and samples that begin with them, to text without special tokens.

        Args:
            prompts: Token ids. [B, P] Alone, they are decoded as by the trainer's own `decode`.
            samples: Prompts with their responses; of an encoder-decoder, responses only. [B, T]
            prompt_sizes: Number of prompt tokens in each sample; None: those of `prompts`.
            kwargs: `append_eos_token`, which is not followed: no text has special tokens.

        Returns:
            The texts of samples, prompts and outputs. Outputs are cut at stop sequences.
        """
        if samples is None:
            return super().decode(prompts)  # type: ignore[misc]
        from trlx_like.samplers.text import SEPARATOR

        trainer: Any = self
        sizes = [0 if trainer.seq2seq else len(row) for row in prompts] if prompt_sizes is None else prompt_sizes
        asked: list[str] = super().decode(prompts)  # type: ignore[misc]
        after = [sample[int(size) :] for sample, size in zip(samples, sizes, strict=True)]
        outputs: list[str] = super().decode(after)  # type: ignore[misc]
        for stop in trainer.stop_sequences:
            outputs = [output.split(stop)[0] for output in outputs]
        between = SEPARATOR if trainer.seq2seq else ""
        return [f"{a}{between}{output}" for a, output in zip(asked, outputs, strict=True)], asked, outputs

    def save_pretrained(self, directory: str | Path | None = None, **kwargs: Any) -> None:
        """Export the model, by default to `hf_model` in the run folder."""
        folder = Path(self.run.directory, "hf_model") if directory is None else directory  # type: ignore[attr-defined]
        super().save_pretrained(folder, **kwargs)  # type: ignore[misc]

    def load(self, directory: str | Path | None = None) -> None:
        """Restore a checkpoint, by default the newest one of the run folder."""
        super().load(self.run.directory if directory is None else directory)  # type: ignore[misc, attr-defined]


def _whole(trainer: Any, generate: Callable[..., Any], ids: Any, mask: Any, options: Mapping[str, Any]) -> Any:
    """Generate responses to a batch of token ids and append them to it. Other queries are passed on."""
    import torch

    if not (isinstance(ids, torch.Tensor) and ids.dim() == 2):
        return generate(ids, **options)
    real = torch.ones_like(ids) if mask is None else mask
    responses = generate([row[keep.bool()] for row, keep in zip(ids, real, strict=True)], **options)
    made = torch.nn.utils.rnn.pad_sequence(
        [row.cpu() for row in responses], batch_first=True, padding_value=trainer.tokenizer.pad_token_id
    )
    return (made if trainer.seq2seq else torch.cat([ids.cpu(), made], dim=1)).to(ids.device)


@cache
def with_calls(trainer_class: type[Any]) -> type[Any]:
    """Return a trainer class of this package whose methods take trlX's arguments."""
    if issubclass(trainer_class, Calls) or not hasattr(trainer_class, "generate"):
        return trainer_class
    return type(trainer_class.__name__, (Calls, trainer_class), {"__module__": __name__})


def get_logger(name: str | None = None) -> Any:
    """Return a logger of the standard library."""
    import logging

    return logging.getLogger(name or "trlx_like")


def set_verbosity(level: int | str) -> None:
    """Set the level from which this package's log is printed."""
    get_logger().setLevel(level)


def _look_up(module: str, name: str) -> Any:
    """Return what a name of a module of trlX stands for.

    Raises:
        AttributeError: For names with underscores, which programs try out.
        ImportError: For a name that this package has no counterpart of.
    """
    source = MODULES[module].get(name)
    if f"{module}.{name}" in MODULES:
        return import_module(f"{module}.{name}")
    if source is None:
        if name.startswith("__"):
            raise AttributeError(name)
        advice = GONE.get(name, "see MIGRATING.md")
        raise ImportError(f"trlx_like has no counterpart of {module}.{name}: {advice}.")
    place, _, attribute = source.partition(":")
    attribute, _, argument = attribute.partition(" ")
    found: Any = import_module(place[1:] if place.startswith("=") else f"trlx_like.{place}")
    for part in filter(None, attribute.split(".")):
        found = getattr(found, part)
    if argument:
        return partial(found, argument)
    return with_calls(found) if name.startswith("Accelerate") else found


class _Modules(MetaPathFinder, Loader):
    """Finds the modules of trlX in `MODULES`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "trlx":
            return None
        if name in MODULES:
            return ModuleSpec(name, self, is_package=True)
        advice = next((why for start, why in _MODULES_GONE.items() if name.startswith(start)), "see MIGRATING.md")
        raise ModuleNotFoundError(f"trlx_like has no counterpart of {name}: {advice}.", name=name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "The names of trlX, which stand for those of trlx_like."
        names = MODULES[module.__name__]
        vars(module).update(__getattr__=partial(_look_up, module.__name__), __dir__=lambda: [*names], __all__=[*names])


_known = sys.modules.get("trlx")
if _known is not None and not isinstance(getattr(_known.__spec__, "loader", None), _Modules):
    raise ImportError("trlX itself was imported already: import trlx_like.compat.trlx before it.")
if not any(isinstance(finder, _Modules) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Modules())
