"""Estimate the memory of DDPO on Stable Diffusion 1.5, without a GPU and without computing anything.

    python -m benchmarks.ddpo_memory [configs/ddpo_sd15_lora.yml]

The model has the real parts and settings of Stable Diffusion 1.5, but fake tensors: torch derives their shapes and
formats without data. The benchmark counts the bytes of all tensors that are alive at once during sampling, decoding and
one micro-batch of training, with torch's fused attention. A real GPU also needs memory for its context (some hundred
megabytes), for workspaces of kernels and for gaps between tensors: keep a tenth of its memory free.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trlx_like import TRLConfig
from trlx_like.data.diffusion import Conditioning
from trlx_like.models.diffusion import DiffusionModel

FORMATS = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Alive(TorchDispatchMode):
    """Count the bytes of the storages that are alive, and their maximum."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.most = 0
        self._known: dict[int, int] = {}

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = storage.nbytes()
            self.bytes += storage.nbytes()
            self.most = max(self.most, self.bytes)
            weakref.finalize(storage, self._drop, storage._cdata)

    def _drop(self, key: int) -> None:
        self.bytes -= self._known.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for value in tree_iter(found):
            if isinstance(value, Tensor):
                self.add(value)
        return found


def stable_diffusion() -> Any:
    """Make the parts of Stable Diffusion 1.5 with random weights."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
    blocks: dict[str, Any] = {
        "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4,
        "block_out_channels": (128, 256, 512, 512),
    }
    make: Any = StableDiffusionPipeline
    return make(
        vae=AutoencoderKL(latent_channels=4, layers_per_block=2, sample_size=512, **blocks),
        text_encoder=CLIPTextModel(CLIPTextConfig(num_attention_heads=12, projection_dim=768, **sizes)),
        tokenizer=None,
        unet=UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8),
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def prepared(config: TRLConfig, pipeline: Callable[[], Any], device: str) -> DiffusionModel:
    """Make the model as the trainer prepares it."""
    mixed, method = config.backend.mixed_precision, config.method
    with torch.device(device):
        made = DiffusionModel(pipeline())
        if config.model.peft_config is not None:
            made.add_adapter(config.model.peft_config)
        made.place(torch.device(device), None if mixed == "no" else FORMATS[mixed])
    if config.backend.gradient_checkpointing:
        made.denoiser.enable_gradient_checkpointing()  # type: ignore[operator]
    made.slice_vae(method.vae_slicing)  # type: ignore[attr-defined]
    return made


def become_fake(model: DiffusionModel) -> None:
    """Replace the weights of a model on the device "meta" by fake CPU tensors. Call it within a fake mode."""
    for module in [module for part in (model, *model.frozen) for module in part.modules()]:
        tensors: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for held in tensors:
            for name, tensor in held.items():
                if tensor is not None:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    held[name] = nn.Parameter(fake, tensor.requires_grad) if held is tensors[0] else fake


def phases(config: TRLConfig, model: DiffusionModel) -> dict[str, int]:
    """Return the bytes of the weights, and the peak bytes beside them of sampling, decoding and training."""
    method: Any = config.method
    size = config.sampler.batch_size or method.chunk_size * method.num_generations
    with Alive() as alive:
        parts = [*model.parameters(), *model.buffers()]
        for tensor in [*parts, *(weight for part in model.frozen for weight in [*part.parameters(), *part.buffers()])]:
            alive.add(tensor)
        weights = alive.bytes
        found = {"weights": weights}
        model.eval()
        with torch.no_grad():
            with most(alive, found, "drawing"):
                _output(config, model, size)
            with most(alive, found, "decoding"):
                model.decode(torch.randn(size, *model.shape))
        model.train()
        with most(alive, found, "learning"):
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            moments = [torch.empty_like(parameter) for parameter in trained for _ in range(2)]  # the moments of Adam
            _output(config, model, config.train.minibatch_size or config.train.batch_size).square().sum().backward()
            del moments
    return found


def _output(config: TRLConfig, model: DiffusionModel, images: int) -> Tensor:
    """Run one denoising step of several images."""
    method: Any = config.method
    mixed, width = config.backend.mixed_precision, model.denoiser.config.cross_attention_dim  # type: ignore[union-attr]
    embeds = torch.randn(images, 77, width)  # type: ignore[arg-type]
    prompts = Conditioning(embeds, None, torch.randn_like(embeds), None)
    x, times = torch.randn(images, *model.shape), torch.zeros(images, dtype=torch.long)
    with torch.autocast("cpu", FORMATS[mixed], enabled=mixed != "no"):
        guided, _ = model(x, times, prompts, method.guidance_scale)
    return guided.float()  # type: ignore[no-any-return]


@contextmanager
def most(alive: Alive, found: dict[str, int], name: str) -> Iterator[None]:
    """Record the peak bytes within a block, beside those alive before it."""
    before = alive.most = alive.bytes
    yield
    found[name] = alive.most - before


def estimate(config: TRLConfig) -> dict[str, int]:
    """Run `phases` on fake tensors."""
    model = prepared(config, stable_diffusion, "meta")
    with FakeTensorMode():
        become_fake(model)
        return phases(config, model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/ddpo_sd15_lora.yml"))
    found = estimate(TRLConfig.load_yaml(parser.parse_args().config))
    for name, size in found.items():
        print(f"{name:10} {size / 1e9:6.2f} GB")
    weights = found.pop("weights")
    print(f"{'together':10} {(weights + max(found.values())) / 1e9:6.2f} GB: the weights and the largest of the others")


if __name__ == "__main__":
    main()
