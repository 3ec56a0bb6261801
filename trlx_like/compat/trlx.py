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
from inspect import Parameter, Signature
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trlx_like import api, presets
from trlx_like.config import TRLConfig
from trlx_like.config.elsewhere import TABLES, answers
from trlx_like.config.yaml_source import packaged
from trlx_like.rewards.arguments import accepted, name_of, parameters

if TYPE_CHECKING:
    from torch import Tensor

MODULES: Mapping[str, Mapping[str, str]] = packaged(TABLES)["trlx_modules"]
"""trlX's modules: name in trlX -> "module:attribute" in this package."""


def default_ppo_config() -> TRLConfig:
    """Return the preset of PPO with all values of trlX."""
    return presets.default_ppo_config().evolve(
        model={"num_layers_unfrozen": 2},
        method={"init_kl_coef": 0.001, "scale_reward": None},
        train={"seq_length": 1024},
        optimizer={"kwargs": {"lr": 3e-5}},
        scheduler={"kwargs": {"eta_min": 3e-5}},
    )


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
        model_path, samples, rewards, prompts, eval_prompts, metric_fn, stop_sequences: as in `trlx_like.train`.
        reward_fn: as in `trlx_like.train`. A function of yours gets texts as from trlX, see `WithEnds`.
        dataset: the older form of `(samples, rewards)`.
        config: as in `trlx_like.train`. A `logit_mask` in `train.trainer_kwargs` is True where a token is forbidden.

    Returns:
        The trainer, whose methods take trlX's arguments, see `Calls`.

    Raises:
        TrlxError: as `trlx_like.train`.
    """
    if dataset is not None:
        samples, rewards = dataset
    if config is None and samples is None and reward_fn is not None:
        config = default_ppo_config()
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
        reward_fn=with_ends(reward_fn),
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


class WithEnds:
    """Call a reward function with EOS behind each text that has ended, as trlX calls it.

    It stands in `samples` and `outputs` of responses that ended by EOS or at a stop sequence, so that these outputs are
    never empty. trlX leaves it out in evaluations; here a text has the same reward in evaluations as in training.

    Args:
        func: The reward function.
    """

    def __init__(self, func: Callable[..., Any]) -> None:
        self.func = func
        self.__qualname__ = name_of(func)
        own = ("samples", "prompts", "outputs", "tokenizer", "finish_reasons")
        names = dict.fromkeys([*own, *sorted(parameters(func)[0])])
        keywords = [Parameter(name, Parameter.KEYWORD_ONLY) for name in names if name in own]
        keywords += [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in names if name not in own]
        self.__signature__ = Signature([*keywords, Parameter("others", Parameter.VAR_KEYWORD)])

    def __call__(self, **keywords: Any) -> Any:
        """Call the function with the keywords that it accepts, and return what it returns."""
        reasons, eos = keywords["finish_reasons"], keywords["tokenizer"].eos_token or ""
        for name in ("samples", "outputs"):
            pairs = zip(keywords[name], reasons, strict=True)
            keywords[name] = [text if reason == "length" else text + eos for text, reason in pairs]
        if "finish_reasons" not in parameters(self.func)[0]:
            del keywords["finish_reasons"]
        return self.func(**accepted(self.func, keywords, [*keywords]))


def with_ends(reward_fn: Any) -> Any:
    """Wrap a user's function in `WithEnds`; return a reward model, a name or a function of this package as it is."""
    own = hasattr(reward_fn, "from_pretrained") or type(reward_fn).__module__.startswith("trlx_like.")
    return reward_fn if own or not callable(reward_fn) else WithEnds(reward_fn)


class Calls:
    """Methods of a trainer with the arguments of trlX. Those of this package work too."""

    def __init__(self, config: TRLConfig, *, reward_fn: Any = None, **kwargs: Any) -> None:
        super().__init__(config, reward_fn=with_ends(reward_fn), **kwargs)  # type: ignore[call-arg]

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

    def decode(
        self, prompts: Any, samples: Any = None, prompt_sizes: Any = None, append_eos_token: bool = False
    ) -> Any:
        """Decode prompts, and samples that begin with them, to text without special tokens.

        Args:
            prompts: Token ids. [B, P] Alone, they are decoded as by the trainer's own `decode`.
            samples: Prompts with their responses; of an encoder-decoder, responses only. [B, T]
            prompt_sizes: Number of prompt tokens in each sample; None: those of `prompts`.
            append_eos_token: Add EOS to outputs that were cut at a stop sequence, or end with EOS or padding.

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
        ends = [
            int(sample[-1]) in (trainer.tokenizer.eos_token_id, trainer.tokenizer.pad_token_id) for sample in samples
        ]
        for stop in trainer.stop_sequences:
            ends = [end or stop in output for end, output in zip(ends, outputs, strict=True)]
            outputs = [output.split(stop)[0] for output in outputs]
        eos = trainer.tokenizer.eos_token if append_eos_token else ""
        outputs = [output + eos * end for output, end in zip(outputs, ends, strict=True)]
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
        advice = answers("trlx").get(name, "see MIGRATING.md")
        raise ImportError(f"trlx_like has no counterpart of {module}.{name}: {advice}.")
    place, _, argument = source.partition(" ")
    found: Any = resolve_name(place.removeprefix("=") if place.startswith("=") else f"trlx_like.{place}")
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
        known = answers("trlx").items()
        advice = next((words for start, words in known if f"{name}.".startswith(start)), "see MIGRATING.md")
        raise ModuleNotFoundError(f"trlx_like has no counterpart of {name}: {advice}.", name=name)

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "The names of trlX, which stand for those of trlx_like."
        names = MODULES[module.__name__]
        vars(module).update(__getattr__=partial(_look_up, module.__name__), __dir__=lambda: [*names], __all__=[*names])


_known = sys.modules.get("trlx")
if _known is not None and not isinstance(getattr(_known.__spec__, "loader", None), _Modules):
    raise ImportError("trlX itself was imported already: import trlx_like.compat.trlx before it.")
if not any(isinstance(finder, _Modules) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Modules())
