"""DDPO (Black et al. 2023): denoising as a decision process, and a policy gradient on its steps.

A round generates images from prompts, scores them, and turns the rewards into advantages. Then `inner_epochs` passes
apply PPO's clipped loss to every denoising step of every image, with the image's advantage. A micro-batch is one
denoising step of `train.minibatch_size` images, so only the activations of one step are in memory. With
`advantages: group` and `beta` it is Flow-GRPO (Liu et al. 2025) on flow-matching models. Left out on purpose: gradients
of a differentiable reward through the image.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trlx_like.checkpoint import isolated_rng
from trlx_like.config.methods.ddpo import DDPOConfig
from trlx_like.data.diffusion import DenoisingExperience, as_bytes
from trlx_like.errors import ConfigError
from trlx_like.functional.counter import keys, orders
from trlx_like.functional.diffusion import gaussian_kl
from trlx_like.functional.group_advantages import group_centered, group_ties, scaled
from trlx_like.functional.policy_gradient import clipped_surrogate, ratio_metrics
from trlx_like.functional.prompt_statistics import PromptStatistics, normalized
from trlx_like.models.diffusion import DiffusionModel
from trlx_like.models.diffusion_families import inspect_pipeline, load_pipeline
from trlx_like.models.merging import has_adapter
from trlx_like.models.reference import Fingerprint
from trlx_like.pipelines.captions import CaptionFunction, Captions, read_captions
from trlx_like.pipelines.prompts import PromptStream
from trlx_like.rewards.outcome import whole
from trlx_like.rewards.runner import Scores
from trlx_like.samplers.agreement import MIXED
from trlx_like.samplers.diffusion import DiffusionSampler, EncodedPrompts, Trajectories, as_pictures
from trlx_like.samplers.schedules import DDIMSchedule, FlowSchedule, Schedule
from trlx_like.trainers.base import BaseRLTrainer, LossOutput, Metrics
from trlx_like.trainers.context import DENOISING_ORDER, EVALUATION, PROMPT_FUNCTION, ROLLOUTS
from trlx_like.trainers.ddpo_images import ShownImages, evaluation_rows, image_rows, show_evaluation

logger = logging.getLogger(__name__)


class DDPOTrainer(BaseRLTrainer[DenoisingExperience]):
    """Train the denoising model of a diffusers pipeline, or a LoRA on it, with rewards for its images."""

    method_class = DDPOConfig
    experience_class = DenoisingExperience
    method: DDPOConfig
    model: DiffusionModel
    uses = frozenset({"prompts", "eval_prompts"})
    needs = ("reward_fn", "prompts")

    def read_inputs(self, tokenizer: Any = None) -> None:
        """Read the prompts, before a model is loaded. `trlx-like check` calls it with one prompt."""
        self._refuse_text_options(tokenizer)
        given = self.data.get("prompts")
        self.captions = None if given is None or callable(given) else read_captions(given)
        self.eval_prompts = self._eval_prompts(given)

    def inspect_models(self) -> None:
        """Check the pipeline by its index and the headers of its files; weights are not read."""
        inspect_pipeline(self.config.model)

    def build(self, tokenizer: Any = None) -> None:
        self.read_inputs(tokenizer)
        method, seed = self.method, self.config.train.seed
        given, listed = self.data.get("prompts"), self.captions
        with isolated_rng(seed):  # a path may name a function that trains a model first
            pipeline = load_pipeline(self.config.model)
        self.model = DiffusionModel(pipeline, (method.height, method.width))
        self._prepare_model()
        encoded = EncodedPrompts(self.model, method.negative_prompt, guidance=method.guidance_scale > 1)
        encoded.remember([captions for captions in (listed, self.eval_prompts) if captions is not None])
        self.sampler = DiffusionSampler(
            self.model,
            self.schedule(),
            encoded,
            guidance_scale=method.guidance_scale,
            learn_guided=method.train_cfg,
            through_negative=method.guidance_gradient,
            batch_size=self.config.sampler.batch_size,
        )
        self.prompt_statistics = PromptStatistics(method.stat_buffer_size, method.stat_min_count)
        self.state.register("prompt_statistics", self.prompt_statistics)
        if given is not None:
            self.prompts = CaptionFunction(given, self._seeded) if listed is None else PromptStream(listed, seed)
            self.state.register("prompts", self.prompts)

    def _prepare_model(self) -> None:
        """Set up the adapter, number formats, device, reference and memory-saving options."""
        model, config = self.model, self.config
        if config.model.peft_config is not None:
            model.add_adapter(config.model.peft_config)
        model.place(self.device, MIXED.get(config.backend.mixed_precision))
        adapted = has_adapter(model.denoiser)
        if adapted or self.method.beta:
            self.world.same_weights([*model.parameters(), *model.buffers()])
        if adapted:  # the weights beside it are not in checkpoints
            self.state.register("base", Fingerprint([model.denoiser], "what the adapter is for"))
        if self.method.beta:
            model.add_reference()
            self.state.register("reference", Fingerprint(model.reference_modules()))
        if config.backend.gradient_checkpointing:
            model.denoiser.enable_gradient_checkpointing()  # type: ignore[operator]
        model.slice_vae(self.method.vae_slicing)

    def schedule(self) -> Schedule:
        """Make the schedule of denoising steps from the pipeline's own scheduler."""
        method, scheduler = self.method, self.model.pipeline.scheduler
        if self.model.family.flow:
            return FlowSchedule(scheduler, method.num_inference_steps, method.noise_level)
        clipped = method.use_clipped_model_output
        return DDIMSchedule(scheduler, method.num_inference_steps, method.eta, use_clipped_model_output=clipped)

    @property
    def passes(self) -> int:
        return self.method.inner_epochs

    # A round.

    def make_experience(self) -> Metrics:
        self.rollouts.begin()
        made: list[DenoisingExperience] = []
        prompts: list[str] = []
        rewards: list[float | None] = []
        shown = ShownImages(self.run, self.method.grid_interval)
        for images, scores in self.scored_images():
            self.rollouts.add_images(scores, images.captions.texts)
            made += self.experience(images).split()
            prompts += images.captions.texts
            rewards += map(whole, scores.rewards)
            shown.add(images, scores)
        self.rollouts.check()
        scored = torch.tensor([reward is not None for reward in rewards], dtype=torch.bool)
        values = torch.tensor([reward or 0.0 for reward in rewards], dtype=torch.float64)
        numbers = [int(element.place) for element in made if element.place is not None]
        advantages, kept = self.advantages(prompts, values, scored, numbers)
        advantages = advantages.clamp(-self.method.adv_clip, self.method.adv_clip)
        for row in kept.nonzero().flatten().tolist():
            made[row].advantages.fill_(advantages[row])
            made[row].rewards.fill_(values[row])
            self.push_to_store([made[row]])
        self.rollouts.keep(kept.tolist())
        shown.log([a if keep else None for a, keep in zip(advantages.tolist(), kept.tolist(), strict=True)])
        return {}

    def scored_images(self) -> Iterator[tuple[Trajectories, Scores]]:
        """Generate and score this process's images of a round; yield each chunk with its scores."""
        method = self.method

        def draw(begin: int, count: int) -> Trajectories | None:
            captions = self.rollouts.own(self.prompts.take(count))
            self.run.ledger.use(self.world.share(self.prompts.taken), self.prompts.rows)
            stream = self.run.stream(ROLLOUTS, self.progress.round)
            return self.make_images(captions.repeated(method.num_generations), stream)

        count, rows = method.num_samples // method.num_generations, partial(image_rows, kind=method.image_type)
        assert self.reward_fn is not None
        return self.rollouts.chunks(self.reward_fn, count, method.chunk_size, draw, rows)

    def make_images(self, captions: Captions, stream: int | None = None) -> Trajectories | None:
        """Generate one image for each caption.

        Args:
            captions: The prompts. In the last chunk of a round a process may have none.
            stream: Determines the noise, see `DiffusionSampler.sample`.

        Returns:
            The images with their denoising trajectories; None if there are no captions.
        """
        if not len(captions):
            return None
        with self.run.forward("generate"):
            return self.sampler.sample(captions, self.device, stream)

    def experience(self, images: Trajectories) -> DenoisingExperience:
        """Convert images to experience: denoising steps in a random order for each image, with advantages to be set."""
        drawn, numbers = self.sampler.schedule.stochastic_steps, images.captions.numbers
        order = drawn[orders(keys(self.run.stream(DENOISING_ORDER, self.progress.round), numbers), len(drawn))]
        caption, caption_mask = as_bytes(images.captions.texts)
        return DenoisingExperience(
            **{**vars(images.prompts), "place": torch.tensor(numbers)},
            latents=images.latents,
            old_logprobs=images.logprobs,
            order=order,
            rewards=torch.full((len(order),), torch.nan),
            advantages=torch.zeros(len(order)),
            caption=caption,
            caption_mask=caption_mask,
        )

    def advantages(
        self, prompts: list[str], rewards: Tensor, scored: Tensor, numbers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Compute the advantages of this process's images from the rewards on all processes.

        Args:
            prompts: The prompt of each of the N images.
            rewards: The reward of each image. [N] float64
            scored: Whether an image has a reward. [N] bool
            numbers: The number of each image in the round.

        Returns:
            The advantages [N] float64, and a mask [N] bool of the images to train on. These are the images with a
            reward; `advantages: group` also excludes groups in which all rewards are equal.
        """
        table = zip(numbers, prompts, rewards.tolist(), scored.tolist(), strict=True)
        everything = sorted(self.world.gather([row for row in table if row[-1]]))
        texts, values = [prompt for _, prompt, *_ in everything], [reward for *_, reward, _ in everything]
        if self.method.advantages == "group":
            return self._group_advantages(rewards, scored, values)
        by_prompt = self.method.advantages == "prompt"
        found = self.prompt_statistics.advantages(texts, values) if by_prompt else normalized(values)
        by_number = {row[0]: advantage for row, advantage in zip(everything, found, strict=True)}
        own = torch.tensor([by_number[n] for n in numbers if n in by_number], dtype=torch.float64)
        return torch.zeros_like(rewards).masked_scatter(scored, own), scored

    def _group_advantages(self, rewards: Tensor, scored: Tensor, everything: list[float]) -> tuple[Tensor, Tensor]:
        """Compute (reward - group mean) / (std of all rewards + 1e-4); a group is on one process."""
        scores, mask = (column.reshape(-1, self.method.num_generations) for column in (rewards, scored))
        spread = float(torch.tensor(everything, dtype=torch.float64).std(unbiased=False))
        advantages = scaled(group_centered(scores, mask), spread)
        return advantages.flatten(), (mask & ~group_ties(scores, mask)).flatten()

    # The loss.

    def microbatches(self, batch: DenoisingExperience) -> Iterator[DenoisingExperience]:
        """Yield one denoising step of `train.minibatch_size` images at a time.

        Every image has its own random order of steps. Each pass over the store takes the next steps in that order.
        """
        steps = batch.order.shape[1]
        taken = max(1, int(steps * self.method.timestep_fraction))
        done = self.store.epoch
        size = self.config.train.minibatch_size or len(batch)
        for start in range(0, len(batch), size):
            rows = batch[start : start + size].to(self.device)
            for column in range(done * taken, (done + 1) * taken):
                yield rows.at(column % steps)

    def longest(self, rows: int) -> DenoisingExperience:
        """Make a micro-batch of new images, all of which are of one size."""
        images = self.make_images(self.prompts.take(rows))
        assert images is not None
        return next(self.microbatches(self.experience(images)))

    def units(self, batch: DenoisingExperience) -> float:
        return float(batch.order.numel())

    def loss(self, batch: DenoisingExperience) -> LossOutput:
        method = self.method
        x, prev = batch.latents.unbind(dim=1)
        t, old, advantages = batch.order[:, 0], batch.old_logprobs[:, 0], batch.advantages
        step = self.sampler.score(x, prev, t, batch)
        if method.loss_type == "clip":
            policy_loss = clipped_surrogate(step.logprob, old, advantages, method.cliprange)
        else:
            policy_loss = -advantages * step.logprob
        loss = policy_loss
        metrics = {"losses/policy_loss": policy_loss, **ratio_metrics(step.logprob, old, method.cliprange)}
        if method.beta:
            kl = gaussian_kl(step.mean, self.sampler.reference_mean(x, t, batch), step.std)
            loss = loss + method.beta * kl
            metrics["losses/kl"] = kl
        return LossOutput(loss.sum(), {name: value.detach().sum() for name, value in metrics.items()})

    def accept(self, metrics: Metrics) -> bool:
        """Check the ratio on fresh experience before the step, and warn if rounding moves it out of the clip range.

        Raises:
            SamplerError: If the ratio is further from 1 than rounding explains.
        """
        deviation, limit = metrics["policy/ratio_deviation"], self.method.cliprange
        if self.progress.fresh and deviation > limit:
            logger.warning(
                f"policy/ratio_deviation is {deviation:.2g} on fresh experience, where it should be 0, and above "
                f"method.cliprange ({limit:g}): the sampler and the learner round differently. Give them batches of "
                "one size (sampler.batch_size, train.minibatch_size), or more precise numbers "
                "(backend.mixed_precision)."
            )
        return super().accept(metrics)

    # Evaluation, images by hand, export.

    def evaluate(self) -> Metrics:
        """Generate images for the evaluation prompts, from the same noise every time, and return their metrics."""
        if self.eval_prompts is None:
            return {}
        own = self.world.share(list(range(len(self.eval_prompts))))
        captions, size, stream = self.eval_prompts[own], self.method.chunk_size, self.run.stream(EVALUATION)
        chunks = (self.make_images(captions[start : start + size], stream) for start in range(0, len(captions), size))
        seen, shown = evaluation_rows((images for images in chunks if images is not None), self.method.image_type)
        self.scoring.rate(self.reward_fn, self.metric_fn, seen, shown)
        return show_evaluation(self.run, self.world.join(shown))

    @torch.no_grad()
    def generate(self, prompts: Sequence[Any]) -> list[Any]:
        """Generate one PIL image for each prompt, with the same sampler as in training."""
        self.model.eval()
        images = self.make_images(read_captions(prompts))
        assert images is not None
        return as_pictures(images.images)

    def export(self, directory: Path, merged: bool | None) -> None:
        """Write the pipeline for diffusers to load; with a LoRA and not `merged`, a file for `load_lora_weights`."""
        self.model.save(directory, whole=bool(merged))

    # Checks.

    def _refuse_text_options(self, tokenizer: Any) -> None:
        """Raise ConfigError for arguments that only trainers of text can use."""
        given = {"tokenizer": tokenizer, "logit_mask": self.logit_mask, "stop_sequences": self.stop_sequences or None}
        if unused := [name for name, value in given.items() if value is not None]:
            raise ConfigError(f"{type(self).__name__} makes images and cannot use {', '.join(unused)}.")

    def _eval_prompts(self, prompts: Any) -> Captions | None:
        """Return the evaluation prompts, drawn from the prompt function if there are none but that function."""
        given = self.data.get("eval_prompts")
        if given is not None:
            return read_captions(given)
        if not callable(prompts):
            return None
        return CaptionFunction(prompts, self._seeded).take(self.config.train.batch_size)

    def _seeded(self, call: int) -> AbstractContextManager[None]:
        """Seed all generators for one call of a prompt function."""
        return isolated_rng(self.run.stream(PROMPT_FUNCTION, call) % 2**63)
