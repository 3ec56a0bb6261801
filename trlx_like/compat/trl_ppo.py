"""The names of TRL 0.7 for PPO by hand: a program runs with `from trlx_like.compat.trl import ...` in place of TRL's.

Only names and shapes are translated here. `PPOTrainer` is this package's, with TRL's constructor and `generate`.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trlx_like.config import TRLConfig
from trlx_like.config.elsewhere import answers
from trlx_like.errors import ConfigError, DataError
from trlx_like.models.layout import blocks
from trlx_like.presets import default_ppo_config
from trlx_like.rewards.arguments import metadata_columns
from trlx_like.trainers import ppo
from trlx_like.trainers.base import Metrics
from trlx_like.trainers.by_hand import is_one_query

logger = logging.getLogger(__name__)

DEFAULTS: dict[str, Any] = {
    **{"model_name": None, "learning_rate": 1e-5, "batch_size": 256, "mini_batch_size": 1, "steps": 20000, "seed": 0},
    **{"gradient_accumulation_steps": 1, "ppo_epochs": 4, "gamma": 1.0, "lam": 0.95, "cliprange": 0.2},
    **{"cliprange_value": 0.2, "vf_coef": 0.1, "init_kl_coef": 0.2, "target": 6.0, "horizon": 10000.0},
    **{"adap_kl_ctrl": True, "kl_penalty": "kl", "early_stopping": False, "target_kl": 0.1, "ratio_threshold": 10.0},
    **{"use_score_scaling": False, "use_score_norm": False, "score_clip": None, "whiten_rewards": False},
    **{"max_grad_norm": None, "log_with": None, "tracker_project_name": "trl", "project_kwargs": {}},
    **{"accelerator_kwargs": {}, "tracker_kwargs": {}},
    **{"max_length": None, "max_new_tokens": 256, "output_dir": "trl_run", "exp_name": None},
}
"""Options with TRL's defaults. `max_length`, `max_new_tokens` and `output_dir` are not TRL's: a run needs them here.

`max_length` is at most 1024 by default, or the positions of a loaded model.
"""
IDLE = (
    *("task_name", "query_dataset", "reward_model", "remove_unused_columns", "optimize_cuda_cache", "world_size"),
    *("optimize_device_cache", "compare_steps", "forward_batch_size", "backward_batch_size", "global_batch_size"),
)
"""Options of TRL that need no counterpart."""
INNER: dict[str, dict[str, str]] = {
    "accelerator_kwargs": {"mixed_precision": "backend.mixed_precision", "project_dir": "train.logging_dir"},
    "project_kwargs": {
        "logging_dir": "train.logging_dir",
        "project_dir": "train.checkpoint_dir",
        "total_limit": "train.keep_checkpoints",
    },
}
"""Keys of TRL's options that are mappings for accelerate -> the option that they are here."""


class PPOConfig:
    """Hold the flat options of TRL's PPOConfig, and make this package's configuration of them.

    Args:
        options: TRL's options by name. Three more: `max_length` (tokens of prompt and response), `max_new_tokens` (the
            longest response) and `output_dir` (the run folder).

    Raises:
        ConfigError: For an option that is unknown, or cannot be followed.
    """

    def __init__(self, **options: Any) -> None:
        for name, value in options.items():
            if name in IDLE:
                logger.warning("PPOConfig.%s (%r) has no effect: nothing here needs it.", name, value)
            for key in value if name in INNER else ():
                if key not in INNER[name]:
                    raise ConfigError(f"PPOConfig.{name}: {key!r} is not followed; {', '.join(INNER[name])} are.")
            if name in DEFAULTS or name in IDLE or (not value and name in answers("options")):
                continue
            here = answers("options").get(name)
            raise ConfigError(f"PPOConfig.{name} ({value!r}): " + (f"here this is {here}." if here else "is unknown."))
        vars(self).update({**DEFAULTS, **options})

    def config(self, model: Any, ref_model: Any = None, /, **more: Any) -> TRLConfig:
        """Return the configuration of a run, whose sizes count all processes, and TRL's those of each.

        Args:
            model: `model.model_path`.
            ref_model: `model.ref_model_path`.
            more: Further sections, as in `TRLConfig.evolve`.
        """
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        given = dict(vars(self))
        positions = getattr(getattr(model, "config", None), "max_position_embeddings", None) or 1024
        given["batch_size"] *= processes
        step = processes * given["mini_batch_size"] * given["gradient_accumulation_steps"]
        same = (
            *("ppo_epochs", "gamma", "lam", "cliprange", "cliprange_value", "vf_coef", "init_kl_coef", "kl_penalty"),
            *("ratio_threshold", "whiten_rewards"),
        )
        changes: dict[str, Any] = {
            "model": {"model_path": model, "ref_model_path": ref_model, "num_layers_unfrozen": -1},
            "optimizer": {"name": "adam", "kwargs": {"lr": given["learning_rate"]}},
            "scheduler": {"name": "constant", "kwargs": {}},
            **{f"method.{name}": given[name] for name in same},
            "method.num_rollouts": given["batch_size"],
            "method.target": given["target"] if given["adap_kl_ctrl"] else None,
            "method.horizon": int(given["horizon"]),
            "method.target_kl": 1.5 * given["target_kl"] if given["early_stopping"] else None,
            "method.scale_reward": "running" if given["use_score_scaling"] else None,
            "method.norm_reward": bool(given["use_score_norm"]),
            "method.cliprange_reward": given["score_clip"],
            "method.gen_kwargs.max_new_tokens": given["max_new_tokens"],
            "train.seed": given["seed"],
            "train.batch_size": step,
            "train.minibatch_size": given["mini_batch_size"],
            "train.total_steps": given["steps"] * given["ppo_epochs"] * -(-given["batch_size"] // step),
            "train.epochs": given["steps"],
            "train.seq_length": min(1024, positions) if given["max_length"] is None else given["max_length"],
            "train.max_grad_norm": given["max_grad_norm"],
            "train.tracker": given["log_with"],
            "train.project_name": given["tracker_project_name"],
            "train.run_name": given["exp_name"],
            "train.tracker_kwargs": given["tracker_kwargs"],
            "train.checkpoint_dir": given["output_dir"],
        }
        for name, keys in INNER.items():
            changes |= {keys[key]: value for key, value in given[name].items()}
        changes |= {section: {**changes.get(section, {}), **options} for section, options in more.items()}
        return TRLConfig.update(default_ppo_config(), changes)


class LengthSampler:
    """Draw lengths from `min_value` up to `max_value`, which is left out."""

    def __init__(self, min_value: int, max_value: int) -> None:
        self.values = range(min_value, max_value)

    def __call__(self) -> int:
        """Return a length."""
        return random.choice(self.values)


class PPOTrainer(ppo.PPOTrainer):
    """PPO with TRL's constructor, `dataloader` and `generate`.

    Args:
        config: Options; None are TRL's defaults.
        model: A model with a value head, which is trained further; a model, or a name, which get a new head.
        ref_model: The reference; None: the model as it is given.
        tokenizer: The tokenizer.
        dataset: Rows for `dataloader`.
        optimizer: An optimizer of torch of the model's parameters.
        data_collator: Makes a batch of `dataset` of a list of its rows.
        num_shared_layers: Layers from the bottom that are frozen and shared with the reference.
        lr_scheduler: A schedule of torch of `optimizer`, which goes on once a round, as in TRL.

    Raises:
        ConfigError: For what cannot be followed.
    """

    def __init__(
        self,
        config: PPOConfig | None = None,
        model: Any = None,
        ref_model: Any = None,
        tokenizer: Any = None,
        dataset: Any = None,
        optimizer: Optimizer | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        num_shared_layers: int | None = None,
        lr_scheduler: Any = None,
    ) -> None:
        options = config or PPOConfig()
        policy, reference = (getattr(one, "pretrained_model", one) for one in (model, ref_model))
        policy = vars(options)["model_name"] if policy is None else policy
        objects = {"optimizer": optimizer, "scheduler": lr_scheduler}
        more = {section: {"name": one, "kwargs": {}} for section, one in objects.items() if one is not None}
        if num_shared_layers is not None:
            unfrozen = len(blocks(policy)) - num_shared_layers
            more["model"] = {"num_layers_unfrozen": unfrozen}
        if getattr(getattr(policy, "config", None), "is_encoder_decoder", False):
            more["model"] = {**more.get("model", {}), "model_arch_type": "seq2seq"}
        self.dataset, self.data_collator = dataset, data_collator
        self.given_head: nn.Module | None = getattr(model, "v_head", None)
        self.given_score = getattr(model, "compute_reward_score", None)
        self.by_rounds = lr_scheduler is not None
        super().__init__(options.config(policy, reference, **more), tokenizer=tokenizer)

    def build(self, tokenizer: Any = None) -> None:
        """Make the policy, whose `compute_reward_score` is that of the given model, which shares its base."""
        super().build(tokenizer)
        if self.given_score is not None:
            vars(self.model).update(compute_reward_score=self.given_score)

    def heads(self, hidden_size: int, vocabulary: int) -> dict[str, nn.Module]:
        """Return the value head that the model came with, or a new one."""
        if self.given_head is None:
            return super().heads(hidden_size, vocabulary)
        self.world.same_weights(self.given_head.parameters())  # each process may have drawn its own
        return {"value": self.given_head}

    def optimize(self, batch: ppo.PPOExperience | None) -> Metrics:
        """Make one step; a schedule that was given goes on with the last step of the round only."""
        schedule = self.optimisation.scheduler
        if not self.by_rounds or self.progress.position + 1 == self.round_steps:
            return super().optimize(batch)
        waiting: Any = SimpleNamespace(step=lambda: None, get_last_lr=schedule.get_last_lr)
        self.optimisation.scheduler = waiting
        try:
            metrics = super().optimize(batch)
        finally:
            self.optimisation.scheduler = schedule
        if not self.progress.in_round:  # ended early, by target_kl
            schedule.step()
        return metrics

    @property
    def dataloader(self) -> Iterable[Any]:  # type: ignore[override]
        """Go through the data set once, in shuffled batches of `batch_size` rows."""
        if self.dataset is None:
            raise ConfigError("dataloader: no dataset was given to PPOTrainer.")
        self.begin()
        return self.prepare_dataloader(self.dataset, self.data_collator)

    def prepare_dataloader(
        self, dataset: Any, data_collator: Callable[[list[Any]], Any] | None = None
    ) -> Iterable[Any]:
        """Return shuffled batches of a data set, each process's own share; a last one that is not full is left out."""
        columns = set(getattr(dataset, "column_names", None) or ())
        if not columns and len(dataset) and isinstance(dataset[0], Mapping):
            columns = set(dataset[0])
        if columns and not columns & {"query", "input_ids"}:
            raise DataError(f"dataset has the columns {', '.join(sorted(columns))}; it needs query or input_ids.")
        rows, count, world = len(dataset), self.method.num_rollouts, self.world
        order = torch.randperm(
            rows, generator=torch.Generator().manual_seed(self.config.train.seed + self.progress.round)
        )
        collate = data_collator or metadata_columns
        for start in range(0, rows - count + 1, count):
            if self.finished:
                return
            yield collate([dataset[row] for row in world.share(order[start : start + count].tolist())])

    def generate(  # type: ignore[override]
        self,
        query_tensor: Any,
        length_sampler: Callable[[], int] | None = None,
        batch_size: int | None = None,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Sample responses, by default with their queries in front.

        Args:
            query_tensor: Token ids [P] or a list of them.
            length_sampler: Draws `max_new_tokens`.
            batch_size: Not needed; `sampler.batch_size` bounds the memory.
            return_prompt: Whether the ids of the query come first.
            generate_ref_response: Must be False.
            generation_kwargs: Options of `generate()` of transformers.

        Returns:
            A list of token ids; for one query a tensor [1, T].
        """
        if generate_ref_response:
            raise ConfigError("generate_ref_response: load the reference with transformers, and let it generate.")
        if length_sampler is not None:
            generation_kwargs["max_new_tokens"] = length_sampler()
        if (generation_kwargs.get("min_length") or 0) <= 0:  # TRL's -1 says that there is none
            generation_kwargs.pop("min_length", None)
        responses = super().generate(query_tensor, **generation_kwargs)
        if not return_prompt:
            return responses
        if is_one_query(query_tensor):
            return torch.cat([torch.tensor(self.by_hand.ids(query_tensor)).to(responses), responses[0]])[None]
        pairs = zip(query_tensor, responses, strict=True)
        return [torch.cat([torch.tensor(self.by_hand.ids(query)).to(ids), ids]) for query, ids in pairs]

    def step(
        self,
        queries: Sequence[Any],
        responses: Sequence[Tensor],
        scores: Sequence[Any],
        response_masks: Sequence[Tensor] | None = None,
    ) -> dict[str, float]:
        """Train for one round, which has `batch_size` samples; see `trlx_like.PPOTrainer.step`."""
        expected = self.method.num_rollouts // self.world.size
        if len(queries) != expected:
            raise DataError(f"step: {len(queries)} queries; PPOConfig.batch_size says {expected} for each process.")
        return super().step(queries, responses, scores, response_masks)
