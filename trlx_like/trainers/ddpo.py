"""DDPO (Black et al. 2023): denoising as a decision process, and a policy gradient on its steps.

A round: make images of prompts, score them, compare the rewards; then `inner_epochs` passes, in which every denoising
step of every image has PPO's clipped loss with the image's advantage. One step of `train.minibatch_size` images is a
micro-batch, so the activations of one step are alive. With `advantages: group` and `beta` it is Flow-GRPO (Liu et al.
2025) on flow-matching models. Left out on purpose: rewards that are differentiated through the image.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from trlx_like.checkpoint import isolated_rng
from trlx_like.config.methods.ddpo import DDPOConfig
from trlx_like.data.diffusion import DenoisingExperience
from trlx_like.errors import ConfigError
from trlx_like.functional.diffusion import gaussian_kl
from trlx_like.functional.group_advantages import group_centered, group_ties, scaled
from trlx_like.functional.policy_gradient import approx_kl, clip_fraction, clipped_surrogate, probability_ratio
from trlx_like.functional.prompt_statistics import PromptStatistics, normalized
from trlx_like.models import Fingerprint, has_adapter
from trlx_like.models.diffusion import DiffusionModel
from trlx_like.models.diffusion_families import load_pipeline
from trlx_like.pipelines.captions import CaptionFunction, Captions, read_captions
from trlx_like.pipelines.prompts import PromptStream
from trlx_like.rewards.runner import Scores
from trlx_like.samplers.diffusion import DiffusionSampler, EncodedPrompts, Trajectories, as_pictures
from trlx_like.samplers.schedules import DDIMSchedule, FlowSchedule, Schedule
from trlx_like.trainers.base import BaseRLTrainer, LossOutput, Metrics
from trlx_like.trainers.ddpo_images import ShownImages, evaluate_images, image_rows
from trlx_like.trainers.scoring import Row, Tally

logger = logging.getLogger(__name__)

FORMATS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class DDPOTrainer(BaseRLTrainer[DenoisingExperience]):
    """Trains the denoising model of a diffusers pipeline, or a LoRA in it, by rewards of its images."""

    method_class = DDPOConfig
    experience_class = DenoisingExperience
    method: DDPOConfig
    model: DiffusionModel
    uses = frozenset({"prompts", "eval_prompts"})
    needs = ("reward_fn", "prompts")

    def build(self, tokenizer: Any = None) -> None:
        self._refuse_text_options(tokenizer)
        method, seed = self.method, self.config.train.seed
        given = self.data.get("prompts")
        listed = None if given is None or callable(given) else read_captions(given)
        self.eval_prompts = self._eval_prompts(given)
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
            self.prompts = CaptionFunction(given) if listed is None else PromptStream(listed, seed)
            self.state.register("prompts", self.prompts)

    def _prepare_model(self) -> None:
        """Adapter, number formats, device, reference, and what saves memory."""
        model, config = self.model, self.config
        if config.model.peft_config is not None:
            model.add_adapter(config.model.peft_config)
        model.place(self.device, FORMATS[config.backend.mixed_precision])
        if has_adapter(model.denoiser):  # the weights beside it are not in checkpoints
            self.world.same_weights([*model.parameters(), *model.buffers()])
            self.state.register("base", Fingerprint([model.denoiser], "what the adapter is for"))
        if self.method.beta:
            self.world.same_weights([*model.parameters(), *model.buffers()])
            model.add_reference()
            self.state.register("reference", Fingerprint(model.reference_modules()))
        if config.backend.gradient_checkpointing:
            model.denoiser.enable_gradient_checkpointing()  # type: ignore[operator]
        model.slice_vae(self.method.vae_slicing)

    def schedule(self) -> Schedule:
        """The denoising steps, by the pipeline's own scheduler."""
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
        method, made = self.method, list[DenoisingExperience]()
        prompts, rewards, shown = list[str](), list[float | None](), ShownImages(self)
        self.scoring.tally = Tally()
        for images, experience, scores in self.scored_images():
            made += experience.split()
            prompts += images.captions.texts
            rewards += cast(list[float | None], scores.rewards)
            shown.add(images, scores)
        counts = self.scoring.round_metrics()
        limit = method.adv_clip
        found = self.advantages(prompts, rewards)
        advantages = [None if advantage is None else min(max(advantage, -limit), limit) for advantage in found]
        for element, advantage in zip(made, advantages, strict=True):
            if advantage is not None:
                element.advantages.fill_(advantage)
                self.push_to_store([element])
        shown.log(advantages)
        return self.rollout_metrics(rewards) | counts

    def scored_images(self) -> Iterator[tuple[Trajectories, DenoisingExperience, Scores]]:
        """A round's images of this process, chunk by chunk, with what is learned from them and what they got."""
        method = self.method

        def draw(begin: int, count: int) -> tuple[Trajectories, DenoisingExperience] | None:
            images = self.make_images(self.own(self.prompts.take(count)).repeated(method.num_generations))
            return None if images is None else (images, self.experience(images))

        def rows(made: tuple[Trajectories, DenoisingExperience]) -> list[Row]:
            return image_rows(made[0], method.image_type)

        count = method.num_samples // method.num_generations
        assert self.reward_fn is not None
        for (images, experience), scores in self.scoring.chunks(self.reward_fn, count, method.chunk_size, draw, rows):
            yield images, experience, scores

    def own(self, captions: Captions) -> Captions:
        """This process's share of prompts that all processes hold."""
        return captions[self.world.share(list(range(len(captions))))]

    def make_images(self, captions: Captions) -> Trajectories | None:
        """An image to each prompt; None without any, as a process may be in the last chunk."""
        if not len(captions):
            return None
        with self.clock("generate"), self.accelerator.autocast():
            return self.sampler.sample(captions, self.device)

    def experience(self, images: Trajectories) -> DenoisingExperience:
        """Images with the order in which their steps are learned from, and no advantage yet."""
        drawn = self.sampler.schedule.stochastic_steps
        order = torch.stack([drawn[torch.randperm(len(drawn))] for _ in images.latents])
        return DenoisingExperience(
            **vars(images.prompts),
            latents=images.latents,
            old_logprobs=images.logprobs,
            order=order,
            advantages=torch.zeros(len(order)),
        )

    def advantages(self, prompts: list[str], rewards: list[float | None]) -> list[float | None]:
        """Of this process's images, compared with those of all processes. None: the image is left out.

        An image without a reward is, and with "group" those of a group of equal rewards.
        """
        shares = self.world.gather([list(zip(prompts, rewards, strict=True))])
        everything = [(prompt, reward) for share in shares for prompt, reward in share if reward is not None]
        texts, values = [prompt for prompt, _ in everything], [reward for _, reward in everything]
        if self.method.advantages == "group":
            return self._group_advantages(rewards, values)
        by_prompt = self.method.advantages == "prompt"
        found = iter(self.prompt_statistics.advantages(texts, values) if by_prompt else normalized(values))
        of_all = [[None if reward is None else next(found) for _, reward in share] for share in shares]
        return of_all[self.world.rank]

    def _group_advantages(self, rewards: list[float | None], everything: list[float]) -> list[float | None]:
        """(r - group mean) / (deviation of all + 1e-4); a group stays on one process."""
        given = [[0.0 if r is None else r, float(r is not None)] for r in rewards]
        table = torch.tensor(given, dtype=torch.float64).reshape(-1, self.method.num_generations, 2)
        scores, mask = table[..., 0], table[..., 1] > 0
        spread = float(torch.tensor(everything, dtype=torch.float64).std(unbiased=False))
        values = scaled(group_centered(scores, mask), spread).flatten().tolist()
        kept = (mask & ~group_ties(scores, mask)).flatten().tolist()
        return [value if keep else None for value, keep in zip(values, kept, strict=True)]

    def rollout_metrics(self, rewards: list[float | None]) -> Metrics:
        """Of the images of a round, over all processes."""
        given = [reward for reward in self.world.gather(list(rewards)) if reward is not None]
        learned = self.world.sum([len(self.store)])[0]
        if not learned:
            logger.warning("Nothing of this round can be learned from, and it passes without a step.")
        return {
            "rollout/score_mean": statistics.fmean(given),
            "rollout/score_std": statistics.pstdev(given),
            "rollout/trained_fraction": learned / self.method.num_samples,
        }

    # The loss.

    def microbatches(self, batch: DenoisingExperience) -> Iterator[DenoisingExperience]:
        """One denoising step of some images at a time. Each pass takes the next steps of an image's own order."""
        steps = batch.order.shape[1]
        taken = max(1, int(steps * self.method.timestep_fraction))
        done = self.progress.position * self.passes // max(self.round_steps or 1, 1)  # passes
        size = self.config.train.minibatch_size or len(batch)
        for start in range(0, len(batch), size):
            rows = batch[start : start + size].to(self.device)
            for column in range(done * taken, (done + 1) * taken):
                yield rows.at(column % steps)

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
        loss, ratio = policy_loss, probability_ratio(step.logprob, old)
        metrics = {
            "losses/policy_loss": policy_loss,
            "policy/approx_kl": approx_kl(step.logprob, old),
            "policy/clip_fraction": clip_fraction(step.logprob, old, method.cliprange),
            "policy/ratio": ratio,
            "policy/ratio_deviation": (ratio - 1).abs(),
        }
        if method.beta:
            kl = gaussian_kl(step.mean, self.sampler.reference_mean(x, t, batch), step.std)
            loss = loss + method.beta * kl
            metrics["losses/kl"] = kl
        return LossOutput(loss.sum(), {name: value.detach().sum() for name, value in metrics.items()})

    def after_step(self, metrics: Metrics) -> None:
        """On fresh experience the policy that learns must be the policy that sampled: every ratio is 1."""
        deviation = metrics["policy/ratio_deviation"]
        if self.progress.position == 1 and deviation > self.method.cliprange:
            logger.warning(
                "policy/ratio_deviation is %.2g on fresh experience, where it should be 0, and above method.cliprange "
                "(%g): the sampler and the learner round differently. Give them batches of one size "
                "(sampler.batch_size, train.minibatch_size), or more precise numbers (backend.mixed_precision).",
                deviation,
                self.method.cliprange,
            )

    # Evaluation, images by hand, export.

    def evaluate(self) -> Metrics:
        return evaluate_images(self)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Any]) -> list[Any]:
        """PIL images to prompts, drawn as those that are trained on."""
        self.model.eval()
        images = self.make_images(read_captions(prompts))
        assert images is not None
        return as_pictures(images.images)

    def save_pretrained(self, directory: str | Path, *, merged: bool = False) -> None:
        """A folder that plain diffusers load: the pipeline, or of one with a LoRA a file for `load_lora_weights`.

        merged: the whole pipeline, the LoRA added into its weights. Called by every process; the main one writes.
        """
        if self.world.main:
            self.model.save(Path(directory), whole=merged)
        self.world.barrier()

    # Checks.

    def _refuse_text_options(self, tokenizer: Any) -> None:
        given = {"tokenizer": tokenizer, "logit_mask": self.logit_mask, "stop_sequences": self.stop_sequences or None}
        if unused := [name for name, value in given.items() if value is not None]:
            raise ConfigError(f"{type(self).__name__} makes images and cannot use {', '.join(unused)}.")

    def _eval_prompts(self, prompts: Any) -> Captions | None:
        """What is evaluated on; of a function of prompts, some that it makes with random numbers of their own."""
        given = self.data.get("eval_prompts")
        if given is not None:
            return read_captions(given)
        if not callable(prompts):
            return None
        with isolated_rng(self.config.train.seed):
            return CaptionFunction(prompts).take(self.config.train.batch_size)
