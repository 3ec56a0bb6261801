"""The frozen reference that a policy is held close to. It equals the policy at step 0, exactly."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trlx_like.errors import CheckpointError, ConfigError
from trlx_like.models.adapters import AdapterWeights, has_adapter
from trlx_like.models.layout import BlockInputs, Head, TopBlocks, base_model, blocks, lm_head, run_base


class Reference(Protocol):
    """What scores tokens under the reference."""

    @property
    def head(self) -> Head: ...

    def hidden(self, inputs: Mapping[str, Tensor], last: Tensor, branch: BlockInputs | None) -> Tensor:
        """The reference's last hidden state [B, T, H].

        last: the policy's own. branch: what enters the policy's first trained block (None where all are trained).
        """
        ...

    def modules(self) -> list[nn.Module]:
        """What has to be moved to the device: its own parameters, not those shared with the policy."""
        ...

    def weight_pairs(self, lm: PreTrainedModel) -> Iterator[tuple[Tensor, Tensor]]:
        """Each own parameter with that of the policy which it is a copy of."""
        ...


class FrozenCopy:
    """A whole second model: every layer of the policy is trained, or the reference is another checkpoint."""

    def __init__(self, lm: PreTrainedModel) -> None:
        self.lm = lm.eval().requires_grad_(False)
        self.head = lm_head(self.lm)

    def hidden(self, inputs: Mapping[str, Tensor], last: Tensor, branch: BlockInputs | None) -> Tensor:
        return run_base(self.lm, inputs)[0]

    def modules(self) -> list[nn.Module]:
        return [self.lm]

    def weight_pairs(self, lm: PreTrainedModel) -> Iterator[tuple[Tensor, Tensor]]:
        return _by_name(self.lm, lm)


class FrozenTop:
    """The hydra reference: a frozen copy of the trained top blocks, run from what enters the branch.

    Blocks below the branch, and an encoder, are frozen and shared with the policy, which has already run them.
    """

    def __init__(self, lm: PreTrainedModel, branch: int) -> None:
        self.top = TopBlocks(lm, branch).eval().requires_grad_(False)
        output = lm.get_output_embeddings()
        trained = any(parameter.requires_grad for parameter in output.parameters())
        self.output = copy.deepcopy(output).requires_grad_(False) if trained else None
        self.head = lm_head(lm, self.output)

    def hidden(self, inputs: Mapping[str, Tensor], last: Tensor, branch: BlockInputs | None) -> Tensor:
        assert branch is not None
        hidden: Tensor = self.top(branch)
        return hidden

    def modules(self) -> list[nn.Module]:
        return [self.top] if self.output is None else [self.top, self.output]

    def weight_pairs(self, lm: PreTrainedModel) -> Iterator[tuple[Tensor, Tensor]]:
        yield from _by_name(self.top.base, base_model(lm))
        if self.output is not None:
            yield from _by_name(self.output, lm.get_output_embeddings())


class FrozenPolicy:
    """Nothing of the language model is trained (only heads are), so it is its own reference."""

    def __init__(self, lm: PreTrainedModel) -> None:
        self.head = lm_head(lm)

    def hidden(self, inputs: Mapping[str, Tensor], last: Tensor, branch: BlockInputs | None) -> Tensor:
        return last

    def modules(self) -> list[nn.Module]:
        return []

    def weight_pairs(self, lm: PreTrainedModel) -> Iterator[tuple[Tensor, Tensor]]:
        yield from ()


def _by_name(module: nn.Module, policy: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    theirs = dict(policy.named_parameters())
    for name, parameter in module.named_parameters():
        twin = theirs.get(name)
        if twin is None or twin.shape != parameter.shape:
            raise ConfigError(
                f"model.ref_model_path: a reference that follows the policy must be of its kind, and {name} of one is "
                "not in the other."
            )
        yield parameter, twin


class FrozenAdapter:
    """The policy with its adapter as it was at the start, in place of a second model.

    Of a new adapter that is the model without it. An adapter that was trained before is part of the policy's start,
    where one switched off would not be.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        self.lm = lm
        self.weights = AdapterWeights(lm)
        self._head = lm_head(lm)

    def hidden(self, inputs: Mapping[str, Tensor], last: Tensor, branch: BlockInputs | None) -> Tensor:
        with self.weights.in_place():
            return run_base(self.lm, inputs)[0]

    def head(self, hidden: Tensor) -> Tensor:
        with self.weights.in_place():
            return self._head(hidden)

    def modules(self) -> list[nn.Module]:
        return [self.weights]

    def weight_pairs(self, lm: PreTrainedModel) -> Iterator[tuple[Tensor, Tensor]]:
        # A share of each of two matrices is not that share of their product.
        raise ConfigError("model.peft_config: the reference of an adapter cannot follow the policy.")


def make_reference(lm: PreTrainedModel, num_layers_unfrozen: int, other: PreTrainedModel | None) -> Reference:
    """The cheapest reference that is exact. Call it after freezing and before the first update.

    other: a model to be held close to in place of the policy's own start.
    """
    if other is not None:
        return FrozenCopy(other)
    if has_adapter(lm):
        return FrozenAdapter(lm)
    if num_layers_unfrozen == 0:
        return FrozenPolicy(lm)
    if num_layers_unfrozen < 0:
        return FrozenCopy(create_reference_model(lm))
    return FrozenTop(lm, max(0, len(blocks(lm)) - num_layers_unfrozen))


class Fingerprint:
    """Two sums over the weights of a reference, or of what an adapter is for, in place of the weights themselves.

    They are made again when a run is resumed. If what they are made of has changed since, the run would go on with
    something else without a word.
    """

    def __init__(self, modules: Iterable[nn.Module], name: str = "the reference") -> None:
        self.name = name
        self.sums = [0.0, 0.0]
        for weight in (parameter.detach() for module in modules for parameter in module.parameters()):
            # One after the other: a second copy of a large model, and in float64, would not fit.
            self.sums[0] += float(weight.sum(dtype=torch.float64))
            self.sums[1] += float(weight.abs().sum(dtype=torch.float64))

    def state_dict(self) -> dict[str, list[float]]:
        return {"sums": self.sums}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        pairs = zip(state["sums"], self.sums, strict=True)
        if not all(math.isclose(then, now, rel_tol=1e-5, abs_tol=1e-5) for then, now in pairs):
            raise CheckpointError(
                f"{self.name} is not the model that the run began with: model.model_path or model.ref_model_path has "
                "other weights than then. Put them back, or start a new run."
            )


def create_reference_model(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy of a model, in evaluation mode (the name TRL's users know)."""
    with torch.no_grad():
        reference: PreTrainedModel = copy.deepcopy(model).eval().requires_grad_(False)
    return reference
