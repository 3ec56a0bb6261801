"""What every trainer of a text policy shares: tokenizer, policy, sampler, prompts, evaluation, export."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from trlx_like.checkpoint import isolated_rng
from trlx_like.config.generation import longest_response, swept
from trlx_like.data import Experience
from trlx_like.errors import ConfigError, DataError
from trlx_like.models import (
    HEADS_FILE,
    Fingerprint,
    LanguagePolicy,
    check_folder,
    checkpoint_activations,
    disable_dropout,
    has_adapter,
    hidden_size,
    load_model,
    load_tokenizer,
    load_trained_model,
    save_model,
    vocabulary_size,
)
from trlx_like.pipelines.chat import Message, common_options, encode_prompt
from trlx_like.pipelines.prompts import DATAPIPELINES, PromptBatch, PromptPipeline, PromptStream
from trlx_like.pipelines.tokens import TextEncoder
from trlx_like.samplers.engines import ENGINES, Engine
from trlx_like.samplers.text import SEPARATOR, TextSampler
from trlx_like.trainers.base import BaseRLTrainer, Metrics
from trlx_like.trainers.evaluation import evaluate_text

logger = logging.getLogger(__name__)

E = TypeVar("E", bound=Experience)
Query = str | Tensor | Sequence[Message]
"""A prompt: text, token ids [P], or messages."""


class TextTrainer(BaseRLTrainer[E]):
    """A trainer whose model is a `LanguagePolicy`."""

    model: LanguagePolicy
    keep_dropout = False
    """Whether dropout stays on in training. Off where the loss compares with what was sampled."""
    heads_kind = "ValueHead"
    """The heads beside an exported model: `AutoModelForCausalLMWithValueHead` reads these."""

    def build(self, tokenizer: Any = None) -> None:
        model = self.config.model
        tokenizer = self.tokenizer = load_tokenizer(self.config.tokenizer, model.model_path, tokenizer)
        self.read_data()
        self.eval_pipeline: PromptPipeline | None = None
        self._add_prompts()
        with isolated_rng(self.config.train.seed):  # a path may name a function that trains a model first
            lm = load_trained_model(model)
        if has_adapter(lm):  # the model beside it is not in checkpoints
            lm.to(self.device)
            self.world.same_weights([*lm.parameters(), *lm.buffers()])
            self.state.register("base", Fingerprint([lm], "what the adapter is for"))
        if not self.keep_dropout:
            disable_dropout(lm)
        if self.config.backend.gradient_checkpointing:
            checkpoint_activations(lm)
        self._check_lengths(lm.config)
        self.model = LanguagePolicy(
            lm,
            heads=self.heads(hidden_size(lm), vocabulary_size(lm)),
            head_blocks=self.head_blocks(),
            num_layers_unfrozen=-1 if has_adapter(lm) else model.num_layers_unfrozen,
            temperature=self.temperature,
            allowed=self._allowed(lm.config.vocab_size),
        )
        self.sampler = self.sampler_of(self.make_engine())

    def sampler_of(self, engine: Engine) -> TextSampler:
        """What samples with an engine, by the configuration."""
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
        """What the chat template is told with all messages."""
        return common_options(self.config.tokenizer.chat_template_kwargs)

    # What an algorithm adds.

    def read_data(self) -> None:
        """Reads and checks what is learned from, with the tokenizer, before a model is loaded."""

    def make_engine(self) -> Engine:
        """The engine that generates."""
        return self.engine_for(self.model.lm)

    def engine_for(self, lm: PreTrainedModel) -> Engine:
        """An engine by the configuration for any language model. ConfigError for options that it does not take."""
        name, options = self.config.sampler.engine, self.config.sampler.kwargs
        try:
            engine: Engine = ENGINES.get(name)(lm, self.tokenizer, self.model.allowed, **options)
        except TypeError as error:
            raise ConfigError(f"sampler.kwargs ({options}): {name}: {error}") from error
        return engine

    def sync_sampler(self) -> None:
        """What generates gets the present weights."""
        with self.clock("sync"):
            self.sampler.engine.sync_weights(self.model.lm)

    def heads(self, hidden_size: int, vocabulary: int) -> dict[str, nn.Module]:
        """Heads on the policy's hidden states, by name."""
        return {}

    def head_blocks(self) -> dict[str, int]:
        """For a head's name: how many top blocks it gets as a trained copy of its own."""
        return {}

    @property
    def temperature(self) -> float:
        """The temperature that log-probabilities are taken under: that of what is trained on."""
        return 1.0

    def add_reference(self, moving: bool = False) -> None:
        """The reference: `model.ref_model_path`, or the policy as it is now.

        moving: it will change, so checkpoints have its weights in place of their fingerprint.
        """
        self.load_reference()
        modules = self.model.reference_modules()
        kept = nn.ModuleList(modules) if moving else Fingerprint(modules)
        self.state.register("reference", kept, small=not moving)

    def load_reference(self) -> None:
        """Gives the policy its reference, on the device of this process."""
        path = self.config.model.ref_model_path
        self.model.add_reference(None if path is None else load_model(path, self.config.model))
        for module in self.model.reference_modules():
            module.to(self.device)
            self.world.same_weights([*module.parameters(), *module.buffers()])

    # Prompts.

    @property
    def max_prompt_length(self) -> int:
        """Return how many tokens a prompt may have, so that it and its response fit into `train.seq_length`.

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
        """Prompts to make experience from."""
        self.prompts = PromptStream(pipeline, self.config.train.seed)
        self.state.register("prompts", self.prompts)

    def add_eval_pipeline(self, pipeline: PromptPipeline) -> None:
        """Prompts to evaluate on."""
        self.eval_pipeline = pipeline

    def _add_prompts(self) -> None:
        pipeline = DATAPIPELINES.get(self.config.train.pipeline)
        # A plugin's pipeline may know plain text and causal models only.
        kind: dict[str, Any] = {"seq2seq": True} if self.seq2seq else {}
        kind |= {"template": self.chat_options} if self.chat_options else {}
        for name, add in (("prompts", self.add_prompt_pipeline), ("eval_prompts", self.add_eval_pipeline)):
            if name in self.data:
                add(pipeline(self.data[name], self.max_prompt_length, self.tokenizer, **kind))

    def take_prompts(self, count: int) -> PromptBatch:
        """This process's share of the next `count` prompts of the run."""
        return self.share_prompts(self.prompts.take(count))

    def share_prompts(self, prompts: PromptBatch) -> PromptBatch:
        """This process's share of prompts that all processes hold."""
        return PromptBatch(self.world.share(prompts.ids), self.world.share(prompts.metadata))

    def eval_batches(self) -> Iterator[PromptBatch]:
        """This process's share of the evaluation prompts, in their order."""
        if self.eval_pipeline is None:
            return
        rows = self.world.share(list(range(len(self.eval_pipeline))))
        size = self.config.sampler.batch_size or self.config.train.batch_size
        for start in range(0, len(rows), size):
            yield self.eval_pipeline[rows[start : start + size]]

    def evaluate(self) -> Metrics:
        return evaluate_text(self, self.method.gen_kwargs)

    # Generating by hand.

    @torch.no_grad()
    def generate(self, queries: Sequence[Query], **gen_kwargs: Any) -> list[Tensor]:
        """Responses [R] of token ids to queries (strings, messages, or [P] ids), sampled as experience is."""
        return self._generated(queries, {**self.experience_kwargs, **gen_kwargs})

    @torch.no_grad()
    def generate_eval(self, queries: Sequence[Query], **gen_kwargs: Any) -> list[Tensor]:
        """Responses [R] of token ids to queries, with the options of evaluation (the first value of a sweep)."""
        options = {**self.method.gen_kwargs, **{k: v[0] for k, v in swept(self.method.gen_kwargs).items()}}
        return self._generated(queries, {**options, **gen_kwargs})

    @property
    def experience_kwargs(self) -> dict[str, Any]:
        """Generation options of what is trained on."""
        return dict(self.method.gen_kwargs)

    def decode(self, ids: Sequence[Tensor]) -> list[str]:
        """Texts of rows of ids, without special tokens."""
        return [str(self.tokenizer.decode(row.tolist(), skip_special_tokens=True)) for row in ids]

    def _generated(self, queries: Sequence[Query], options: Mapping[str, Any]) -> list[Tensor]:
        batch = PromptBatch([self.query_ids(query) for query in queries], [{} for _ in queries])
        self.sync_sampler()
        completion = self.sampler.sample(batch, options).completion
        return [element.response for element in completion.split()]

    def query_ids(self, query: Query) -> list[int]:
        """Token ids of a prompt given as text, as messages or as ids."""
        if isinstance(query, str):
            return TextEncoder(self.tokenizer, seq2seq=self.seq2seq).opening([query])[0]
        if not isinstance(query, Tensor):
            return encode_prompt(query, self.tokenizer, place="the query", **self.chat_options).ids
        ids: list[int] = query.reshape(-1).tolist()
        return ids

    # Export.

    def save_pretrained(self, directory: str | Path, *, merged: bool = False) -> None:
        """A folder that plain `AutoModelForCausalLM` (or `...Seq2SeqLM`) and `AutoTokenizer` load; heads beside it.

        Of a model with an adapter it holds the adapter alone; merged: the whole model with the adapter merged into it.
        Called by every process; the main one writes.
        """
        check_folder(self.model.lm, Path(directory), merged)
        if self.world.main:
            self._write_pretrained(Path(directory), merged)
        self.world.barrier()

    def _write_pretrained(self, directory: Path, merged: bool) -> None:
        save_model(self.model.lm, directory, merged)
        self.tokenizer.save_pretrained(directory)
        heads = {
            f"{part}.{name}": value.contiguous()
            for part in ("heads", "head_tops")
            for name, value in getattr(self.model, part).state_dict().items()
        }
        if heads:
            save_file(heads, directory / HEADS_FILE)
            (directory / "README.md").write_text(self._heads_readme(), encoding="utf-8")

    def _heads_readme(self) -> str:
        name = "AutoModelForSeq2SeqLM" if self.seq2seq else "AutoModelForCausalLM"
        return (
            f"The language model of this folder loads by itself with `transformers.{name}.from_pretrained`.\n"
            f"The heads that were trained on it are in `{HEADS_FILE}`; "
            f"`trlx_like.{name}With{self.heads_kind}.from_pretrained` loads both.\n"
        )

    # Checks.

    def _check_lengths(self, config: Any) -> None:
        positions = getattr(config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and self.config.train.seq_length > positions:
            raise ConfigError(
                f"train.seq_length ({self.config.train.seq_length}) is longer than the {positions} positions of "
                "the model."
            )

    def _allowed(self, vocabulary: int) -> Tensor | None:
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
