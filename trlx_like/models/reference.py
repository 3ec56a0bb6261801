"""The frozen reference that KL penalties and preference losses compare with. At step 0 it equals the policy exactly."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trlx_like.errors import CheckpointError, ConfigError
from trlx_like.functional.parts import Unread, flat_range
from trlx_like.models.adapters import AdapterWeights
from trlx_like.models.last_states import Reading, last_block, last_states, read_at
from trlx_like.models.layout import BlockInputs, Head, base_model, blocks, lm_head, top_from
from trlx_like.models.merging import has_adapter
from trlx_like.models.top_blocks import copied_top, freeze_below, reads_below
from trlx_like.models.trunk import Trunk

logger = logging.getLogger(__name__)


@dataclass
class Reference:
    """The frozen model, as functions of what the policy has computed.

    Attributes:
        hidden: Computes the last hidden states as `last_states` does. Its arguments are how the batch is read, the
            policy's own last hidden states, and the inputs of some of the policy's blocks by the number of the block.
            The block at which the policy's `num_layers_unfrozen` begins and the lowest block of its trunk are among
            them.
        head: The language model head.
        modules: The modules with the reference's own parameters, without those that it shares with the policy.
        weight_pairs: Iterates over these parameters, each with the parameter of the policy's language model that it was
            copied from. It raises ConfigError for a reference that cannot follow the policy.
    """

    hidden: Callable[[Reading, Tensor, Mapping[int, BlockInputs]], Tensor]
    head: Head
    modules: Sequence[nn.Module] = ()
    weight_pairs: Callable[[PreTrainedModel], Iterable[tuple[Tensor, Tensor]]] = lambda lm: ()


def frozen_copy(lm: PreTrainedModel) -> Reference:
    """Use a complete second model as the reference, if all layers are trained or it is another checkpoint."""
    lm.eval().requires_grad_(False)
    return Reference(lambda reading, last, branches: last_states(lm, reading), lm_head(lm), [lm], partial(_by_name, lm))


def frozen_top(lm: PreTrainedModel, branch: int) -> Reference:
    """Use a frozen copy of only the trained top blocks as the reference (hydra).

    The blocks below, and an encoder, are frozen and shared with the policy, which has already computed their output. If
    the top blocks read more than that output, the reference is a complete second model.
    """
    top = copied_top(lm, branch)
    if top is None:
        logger.info("The reference is a copy of the whole model: %s.", reads_below(lm))
        return frozen_copy(create_reference_model(lm))
    top.eval().requires_grad_(False)
    head = lm.get_output_embeddings()
    trained = any(parameter.requires_grad for parameter in head.parameters())
    own = copy.deepcopy(head).requires_grad_(False) if trained else None

    def pairs(policy: PreTrainedModel) -> Iterator[tuple[Tensor, Tensor]]:
        yield from _by_name(top.base, base_model(policy))
        if own is not None:
            yield from _by_name(own, policy.get_output_embeddings())

    modules = [top] if own is None else [top, own]
    return Reference(
        lambda reading, last, branches: top(branches[branch], reading.places), lm_head(lm, own), modules, pairs
    )


def frozen_adapter(lm: PreTrainedModel, trunk: Trunk | None = None) -> Reference:
    """Use the policy with the initial weights of its adapter as the reference, without a second copy of the model.

    For a new adapter this equals the model without it. An adapter that was trained before belongs to the policy's
    start, so it cannot simply be switched off.

    Args:
        lm: The policy's language model.
        trunk: The policy's frozen blocks. The reference shares their output, which the policy has already computed.
            None: the reference runs all blocks.
    """
    weights = AdapterWeights(lm)

    def refuse(policy: PreTrainedModel) -> Iterator[tuple[Tensor, Tensor]]:
        # (a + b) / 2 and (c + d) / 2 multiplied are not the mean of ac and bd.
        raise ConfigError("model.peft_config: the reference of an adapter cannot follow the policy.")

    @weights.in_place()
    def hidden(reading: Reading, last: Tensor, branches: Mapping[int, BlockInputs]) -> Tensor:
        if trunk is None or trunk.lowest not in branches:  # the policy may give up its kept states later
            return last_states(lm, reading)
        with read_at(lm, last_block(lm), reading.places):
            return trunk(branches[trunk.lowest].hidden, reading.inputs)[0]

    return Reference(hidden, weights.in_place()(lm_head(lm)), [weights], refuse)


def _by_name(module: nn.Module, policy: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair parameters by name; raise ConfigError if the policy has none of that name and shape."""
    theirs = dict(policy.named_parameters())
    for name, parameter in module.named_parameters():
        twin = theirs.get(name)
        if twin is None or twin.shape != parameter.shape:
            raise ConfigError(
                f"model.ref_model_path: a reference that follows the policy must be of its kind, and {name} of one is "
                "not in the other."
            )
        yield parameter, twin


def make_reference(
    lm: PreTrainedModel, num_layers_unfrozen: int, other: PreTrainedModel | None, trunk: Trunk | None = None
) -> Reference:
    """Make the cheapest reference that is exact. Call it after freezing and before the first update.

    Args:
        lm: The policy's language model.
        num_layers_unfrozen: As for `LanguagePolicy`.
        other: Another model as the reference; None is the policy's own start.
        trunk: The policy's frozen blocks, if it has a trunk.

    Returns:
        The reference.
    """
    if other is not None:
        return frozen_copy(other)
    if has_adapter(lm):
        return frozen_adapter(lm, trunk)
    if num_layers_unfrozen == 0:  # only heads are trained
        return Reference(lambda reading, last, branches: last, lm_head(lm))
    if num_layers_unfrozen < 0:
        return frozen_copy(create_reference_model(lm))
    return frozen_top(lm, top_from(lm, num_layers_unfrozen))


class Fingerprint:
    """Two sums over frozen weights, saved in checkpoints to detect that a resumed run has loaded other weights.

    The weights themselves, a reference or the base of an adapter, are not in checkpoints but loaded again. If they had
    changed since, the run would silently continue with a different model.

    Args:
        modules: The modules with the weights.
        name: What they are, for the error.
        world: The processes of the run (`World`), which share the reading of weights that are still in files.
    """

    def __init__(self, modules: Iterable[nn.Module], name: str = "the reference", world: Any = None) -> None:
        self.name = name
        own, unread = [0.0, 0.0], [0.0, 0.0]
        for parameter in (parameter for module in modules for parameter in module.parameters()):
            weight, sums = parameter.detach(), own
            if isinstance(parameter, Unread):
                weight, sums = parameter.saved.read(*flat_range(weight.shape, world.rank, world.size)), unread
            # One weight at a time: a float64 copy of a large model would not fit into memory.
            sums[0] += float(weight.sum(dtype=torch.float64))
            sums[1] += float(weight.abs().sum(dtype=torch.float64))
        shared = unread if world is None else world.sum(unread)
        self.sums = [one + other for one, other in zip(own, shared, strict=True)]

    def state_dict(self) -> dict[str, list[float]]:
        """Return the sums."""
        return {"sums": self.sums}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Raise CheckpointError if the saved sums differ from those of the present weights."""
        pairs = zip(state["sums"], self.sums, strict=True)
        if not all(math.isclose(then, now, rel_tol=1e-5, abs_tol=1e-5) for then, now in pairs):
            raise CheckpointError(
                f"{self.name} is not the model that the run began with: model.model_path or model.ref_model_path has "
                "other weights than then. Put them back, or start a new run."
            )


def create_reference_model(model: nn.Module, num_shared_layers: int | None = None, pattern: str | None = None) -> Any:
    """Copy a model, frozen and in evaluation mode, under the name that TRL uses.

    Args:
        model: A language model, or one with heads (`PreTrainedModelWrapper`).
        num_shared_layers: How many blocks from the bottom the copy shares with the model, which is frozen there: they
            take no memory of their own. What is below them, such as the embeddings, is shared too. None: no sharing,
            and the model is not changed.
        pattern: Names the blocks, such as "transformer.h.{layer}", if they cannot be found by structure. Everything is
            shared that the model holds before the first weight of block `num_shared_layers`.

    Returns:
        The copy.

    Raises:
        ConfigError: If the model has fewer blocks than are to be shared, no weight fits the pattern, or the model has
            an adapter and blocks are to be shared.
    """
    shared = [] if num_shared_layers is None else _freeze_shared(model, num_shared_layers, pattern)
    with torch.no_grad():
        return copy.deepcopy(model, {id(weight): weight for weight in shared}).eval().requires_grad_(False)


def _freeze_shared(model: nn.Module, count: int, pattern: str | None) -> list[Tensor]:
    """Freeze what a model shares with its reference, and return these weights."""
    lm: Any = getattr(model, "pretrained_model", model)
    if has_adapter(lm):
        raise ConfigError(
            f"num_shared_layers ({count}): all blocks of a model with an adapter are frozen already; leave it out."
        )
    if pattern is None:
        if not 0 <= count < len(blocks(lm)):
            raise ConfigError(
                f"num_shared_layers ({count}) must be at least 0 and below {len(blocks(lm))}, the number of blocks."
            )
        freeze_below(lm, count)
        return [weight for weight in lm.parameters() if not weight.requires_grad]
    named = list(lm.named_parameters())
    wanted = pattern.format(layer=count)
    first = next((at for at, (name, _) in enumerate(named) if f"{wanted}." in name), None)
    if first is None:
        raise ConfigError(f"pattern ({pattern!r}): no weight of {type(lm).__name__} has {wanted!r} in its name.")
    return [weight.requires_grad_(False) for _, weight in named[:first]]
