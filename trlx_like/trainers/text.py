"""Base of all trainers of text policies: tokenizer, policy, sampler, prompts, evaluation, export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from trlx_like.checkpoint import isolated_rng
from trlx_like.config.generation import longest_response, swept
from trlx_like.data import Completion, Experience
from trlx_like.errors import ConfigError, DataError, raised_as
from trlx_like.models.compaction import compaction_of
from trlx_like.models.dropout import disable_dropout
from trlx_like.models.export import save_policy
from trlx_like.models.layout import hidden_size, vocabulary_size
from trlx_like.models.loading import checkpoint_activations, inspect_model, load_model, load_trained_model
from trlx_like.models.merging import has_adapter, plain_weights
from trlx_like.models.policy import LanguagePolicy, PolicyOutput
from trlx_like.models.reference import Fingerprint
from trlx_like.models.sources import check_fit
from trlx_like.models.tokenizer import load_tokenizer
from trlx_like.pipelines.chat import common_options
from trlx_like.pipelines.prompts import DATAPIPELINES, PromptBatch, PromptPipeline, PromptStream
from trlx_like.pipelines.rows import joined_sets
from trlx_like.samplers.agreement import sampled_together
from trlx_like.samplers.engines import ENGINES, Engine, check_engine
from trlx_like.samplers.generation import check_token_ids
from trlx_like.samplers.text import SEPARATOR, TextSampler
from trlx_like.trainers.base import BaseRLTrainer, Metrics
from trlx_like.trainers.by_hand import ByHand, Query
from trlx_like.trainers.evaluation import evaluate_text
from trlx_like.trainers.trunk import TrunkStates

E = TypeVar("E", bound=Experience)
C = TypeVar("C", bound=Completion)


class TextTrainer(BaseRLTrainer[E]):
    """Train a `LanguagePolicy`; algorithms derive from this class."""

    model: LanguagePolicy
    trunk: TrunkStates
    observes: Any = False
    """Whether the samples of a round are scored before its first step; they are read once more then."""
    keep_dropout = False
    """Whether dropout stays on in training, for methods without an option `disable_dropout`.

    A loss that compares with the policy at sampling time needs it off.
    """
    heads_kind = "ValueHead"
    """Ending of the class that loads an exported model with its heads: `AutoModelForCausalLMWith<heads_kind>`."""

    def read_inputs(self, tokenizer: Any = None) -> None:
        """Load the tokenizer and encode the data, before a model is loaded. `trlx-like check` calls it with one row."""
        self.tokenizer = load_tokenizer(self.config.tokenizer, self.config.model.model_path, tokenizer)
        self.scoring.tokenizer = self.tokenizer
        self.read_data()
        self.eval_pipeline: PromptPipeline | None = None
        self._add_prompts()

    def inspect_models(self) -> None:
        """Check the models by the headers of their files; weights are not read."""
        config = self.config.model
        for name, path in (("model_path", config.model_path), ("ref_model_path", config.ref_model_path)):
            found = None if path is None else inspect_model(path, config, f"model.{name}")
            self._check_fit(found)

    def _check_fit(self, found: PretrainedConfig | None) -> None:
        """Check that a model, if it is known, has the positions and tokens that it will be given."""
        check_fit(found, self.config.train.seq_length, self.tokenizer, sampled=not self.offline)
        if found is not None:
            for name in ("gen_kwargs", "gen_experience_kwargs"):
                check_token_ids(getattr(self.method, name, None) or {}, name, found, self.tokenizer)

    def build(self, tokenizer: Any = None) -> None:
        self.read_inputs(tokenizer)
        model = self.config.model
        with isolated_rng(self.config.train.seed):  # a path may name a function that trains a model first
            lm = load_trained_model(model, self.run.backend.reads_files)
        if has_adapter(lm):  # the model beside it is not in checkpoints
            self.world.place(lm)
            self.state.register("base", Fingerprint([lm], "what the adapter is for", self.world))
        if getattr(self.method, "disable_dropout", not self.keep_dropout):
            disable_dropout(lm)
        if self.config.backend.gradient_checkpointing:
            checkpoint_activations(lm)
        self._check_fit(lm.config)
        self.model = LanguagePolicy(
            lm,
            heads=self.heads(hidden_size(lm), vocabulary_size(lm)),
            head_blocks=self.head_blocks(),
            num_layers_unfrozen=-1 if has_adapter(lm) else model.num_layers_unfrozen,
            temperature=self.temperature,
            allowed=self._allowed(lm.config.get_text_config().vocab_size),
        )
        self.model.compaction = compaction_of(lm, self.run.backend.sharded, self.device)
        self.sampler = self.sampler_of(self.make_engine())
        self.run.backend.after_sampling.append(self.sampler.rest)
        self.by_hand = ByHand(self.tokenizer, self.sampler, seq2seq=self.seq2seq, chat_options=self.chat_options)
        self.trunk = TrunkStates(self.run, self.model, self.passes + self.observes, self.offline)

    def sampler_of(self, engine: Engine) -> TextSampler:
        """Make a sampler for an engine, with the configured stop sequences and batch size."""
        return TextSampler(
            engine,
            self.tokenizer,
            stop_sequences=self.stop_sequences,
            separator=SEPARATOR if self.seq2seq else None,
            batch_size=self.config.sampler.batch_size,
            device=self.device,
        )

    @property
    def seq2seq(self) -> bool:
        """Whether the model is an encoder-decoder."""
        return bool(self.config.model.model_arch_type == "seq2seq")

    @property
    def chat_options(self) -> dict[str, Any]:
        """Options that are passed to every call of the chat template."""
        return common_options(self.config.tokenizer.chat_template_kwargs)

    # What an algorithm adds.

    def read_data(self) -> None:
        """Read and check the training data with the tokenizer, before a model is loaded."""

    def make_engine(self) -> Engine:
        """Make the engine that generates rollouts and evaluation samples.

        Raises:
            ConfigError: If the engine does not take the options `sampler.kwargs`.
        """
        name, options = self.config.sampler.engine, self.config.sampler.kwargs
        with raised_as(ConfigError, TypeError, f"sampler.kwargs ({options}): {name}"):
            engine: Engine = ENGINES.get(name)(self.model.lm, self.tokenizer, self.model.allowed, **options)
        check_engine(name, engine)
        return engine

    def sync_sampler(self) -> None:
        """Copy the current weights of the policy to the engine."""
        with self.clock("sync"):
            weights, version = plain_weights(self.model.lm), self.progress.step
            sampled_together(self.world, lambda: self.sampler.engine.sync_weights(weights, version))

    def heads(self, hidden_size: int, vocabulary: int) -> dict[str, nn.Module]:
        """Make the heads on the policy's hidden states, by name. There are none by default.

        Args:
            hidden_size: Width of the hidden states.
            vocabulary: Number of tokens.
        """
        return {}

    def head_blocks(self) -> dict[str, int]:
        """Return for each head how many top blocks it gets as a trained copy of its own; by default it gets none."""
        return {}

    @property
    def temperature(self) -> float:
        """Temperature of the log-probabilities in the loss: the one that the training text was sampled at."""
        return 1.0

    def add_reference(self, moving: bool = False) -> None:
        """Add the reference to the policy: `model.ref_model_path`, or a frozen copy of the policy as it is now.

        Args:
            moving: The reference changes in training, so checkpoints hold its weights. Otherwise they hold a
                fingerprint, which a resume compares.
        """
        self.load_reference()
        modules = self.model.reference_modules()
        kept = self.run.backend.stateful(nn.ModuleList(modules)) if moving else Fingerprint(modules, world=self.world)
        self.state.register("reference", kept, small=not moving)

    def load_reference(self) -> None:
        """Load the reference to the device of this process, without adding it to checkpoints."""
        path, load = self.config.model.ref_model_path, partial(load_model, unread=self.run.backend.reads_files)
        with isolated_rng(self.config.train.seed):  # a path may name a function that trains a model first
            self.model.add_reference(None if path is None else load(path, self.config.model, "model.ref_model_path"))
        for module in self.model.reference_modules():
            self.world.place(module)

    # Prompts.

    @property
    def max_prompt_length(self) -> int:
        """Most tokens of a prompt that leave room for the longest response in `train.seq_length`.

        Raises:
            ConfigError: If responses leave no room for a prompt.
        """
        longest = max(longest_response(options) for options in (self.method.gen_kwargs, self.experience_kwargs))
        seq_length = self.config.train.seq_length
        if longest >= seq_length:
            raise ConfigError(
                f"method.gen_kwargs.max_new_tokens: {longest} must be below train.seq_length ({seq_length})."
            )
        return seq_length - longest

    def add_prompt_pipeline(self, pipeline: PromptPipeline) -> None:
        """Set the prompts that rollouts are sampled for, in place of any others."""
        self.prompts = PromptStream(pipeline, self.config.train.seed)
        self.state.items.pop("prompts", None)
        self.state.register("prompts", self.prompts)

    def add_eval_pipeline(self, pipeline: PromptPipeline) -> None:
        """Set the evaluation prompts."""
        self.eval_pipeline = pipeline

    def _add_prompts(self) -> None:
        pipeline = DATAPIPELINES.get(self.config.train.pipeline)
        # A plugin's pipeline may know plain text and causal models only.
        kind: dict[str, Any] = {"seq2seq": True} if self.seq2seq else {}
        kind |= {"template": self.chat_options} if self.chat_options else {}
        for name, add in (("prompts", self.add_prompt_pipeline), ("eval_prompts", self.add_eval_pipeline)):
            if name in self.data:
                rows = joined_sets(self.data[name])[0] if name == "eval_prompts" else self.data[name]
                add(pipeline(rows, self.max_prompt_length, self.tokenizer, **kind))

    def take_prompts(self, count: int) -> PromptBatch:
        """Take the next `count` prompts of the training data, and return this process's share."""
        prompts = self.rollouts.own(self.prompts.take(count))
        self.rollouts.taken += self.prompts.taken
        self.run.ledger.use(self.world.share(self.prompts.taken), self.prompts.rows)
        return prompts

    def eval_batches(self) -> list[PromptBatch]:
        """Return this process's share of the evaluation prompts in batches, in order."""
        if self.eval_pipeline is None:
            return []
        rows = self.world.share(list(range(len(self.eval_pipeline))))
        size = self.config.sampler.batch_size or self.config.train.batch_size
        chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
        return [self.eval_pipeline[chunk].numbered(chunk) for chunk in chunks]

    def evaluate(self) -> Metrics:
        return self.evaluate_prompts()

    def evaluate_prompts(self, reference: Mapping[str, Sequence[str]] | None = None) -> Metrics:
        """Generate responses to the evaluation prompts, score them, and return the metrics; none without prompts.

        Args:
            reference: Responses of another model to the same prompts, to show in the same table.
        """
        if self.eval_pipeline is None:
            return {}
        self.sync_sampler()
        rate = partial(self.scoring.rate, self.reward_fn, self.metric_fn)
        options, batches = self.method.gen_kwargs, self.eval_batches()
        sets = joined_sets(self.data.get("eval_prompts"))[1]
        sets = self.world.share(sets) if len(sets) == len(self.eval_pipeline) else []
        return evaluate_text(self.run, rate, self.sampler, batches, options, reference=reference or {}, sets=sets)

    @torch.no_grad()
    def score_batch(self, batch: C, size: int | None, **outputs: Any) -> Iterator[tuple[Tensor, C, PolicyOutput]]:
        """Run the policy on a batch without gradients, in parts of similar length.

        Args:
            batch: The responses to score.
            size: Rows of a part; None runs the whole batch at once.
            outputs: The outputs to compute, as in `LanguagePolicy.forward`.

        Yields:
            The rows of each part in the batch [n], the part on the device of this process, and the policy's output.
        """
        for rows, part in batch.microbatches(size):
            part = part.to(self.device)
            with self.run.forward("logprobs"):
                output = self.model(part, **outputs)
            if output.trunk is not None:
                part.keep(output.trunk)
            yield rows, part, output

    # Generating by hand.

    @torch.no_grad()
    def generate(self, queries: Query | Sequence[Query], **gen_kwargs: Any) -> Any:
        """Sample a response to each query with the generation options of training.

        Args:
            queries: Prompts as text, chat messages, or token ids [P]; or one of them alone.
            gen_kwargs: Generation options that override the configured ones.

        Returns:
            A list of the token ids [R] of the response to each query; a tensor [1, R] for one query alone.
        """
        with self.run.backend.sampling():
            self.sync_sampler()
            version = self.progress.step if hasattr(self, "step") else None  # for a step on the responses
            return self.by_hand.generate(queries, {**self.experience_kwargs, **gen_kwargs}, version)

    @torch.no_grad()
    def generate_eval(self, queries: Query | Sequence[Query], **gen_kwargs: Any) -> Any:
        """Sample a response to each query with the generation options of evaluation; otherwise like `generate`.

        If an option has a list of values to sweep over, the first value is used.
        """
        first = {name: values[0] for name, values in swept(self.method.gen_kwargs).items()}
        with self.run.backend.sampling():
            self.sync_sampler()
            return self.by_hand.generate(queries, {**self.method.gen_kwargs, **first, **gen_kwargs})

    def decode(self, ids: Sequence[Tensor]) -> list[str]:
        """Decode each sequence of token ids [R] to text, without special tokens."""
        return [str(self.tokenizer.decode(row.tolist(), skip_special_tokens=True)) for row in ids]

    @property
    def experience_kwargs(self) -> dict[str, Any]:
        """Generation options of rollouts."""
        return dict(getattr(self.method, "experience_kwargs", self.method.gen_kwargs))

    # Export.

    def export(self, directory: Path, merged: bool | None) -> None:
        """Write a folder that `AutoModelForCausalLM` (or `...Seq2SeqLM`) and `AutoTokenizer` load.

        Heads are written to a file of their own in it. An adapter is written alone, unless `merged`.
        """
        save_policy(self.model, self.tokenizer, directory, merged=bool(merged), heads_class=self.heads_kind)

    # Checks.

    def _allowed(self, vocabulary: int) -> Tensor | None:
        """Check `logit_mask` and return it as a tensor [V, V] bool; None without one."""
        if self.logit_mask is None:
            return None
        allowed = torch.as_tensor(self.logit_mask)
        if allowed.shape != (vocabulary, vocabulary) or allowed.dtype != torch.bool:
            raise ConfigError(
                f"logit_mask must be a bool tensor [{vocabulary}, {vocabulary}] (previous token, next token; True = "
                f"allowed), not {allowed.dtype} {list(allowed.shape)}."
            )
        if not allowed.any(dim=1).all():
            row = int((~allowed.any(dim=1)).nonzero()[0])
            raise DataError(f"logit_mask[{row}] allows nothing after token {row}; True means allowed.")
        return allowed
