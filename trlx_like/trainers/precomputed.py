"""Log-probabilities of a reference that does not change, computed once for all given samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, Generic, cast

import torch
from torch import Tensor

from trlx_like.data import Completion, RolloutStore
from trlx_like.data.columns import ColumnRows, as_columns, packed
from trlx_like.data.flat import FlatRows
from trlx_like.models.policy import LanguagePolicy
from trlx_like.pipelines.prepared import SameRows
from trlx_like.trainers.context import Run
from trlx_like.trainers.trunk import E, KeptStates, Place, TrunkStates, parts_by_length


class Precomputed(Generic[E]):
    """Add the reference's log-probabilities to samples, and keep them in checkpoints.

    By the time of a resume the policy is no longer its own reference. So checkpoints hold the samples, and a resumed
    run has to be given the same ones.

    Args:
        run: The run.
        model: The policy, before its first update.
        trunk: Its kept states.
        store: The store that the samples of training will be in.
        load: Adds the reference to the policy; None: the policy as it is now is the reference.
        score: Fills in the log-probabilities of a batch, by the function that it gets, from completions [B, R] to their
            log-probabilities under the reference [B, R]. The first completions that it asks for are those of the batch.
        given: The data by their argument of `train`; a run is not resumed with others.
        fields: The fields of the data that count.
    """

    def __init__(
        self,
        run: Run,
        model: LanguagePolicy,
        trunk: TrunkStates,
        store: RolloutStore[E],
        load: Callable[[], None] | None,
        score: Callable[[E, Callable[[Completion], Tensor]], None],
        given: Mapping[str, Sequence[FlatRows[Any]]],
        fields: Sequence[str],
    ) -> None:
        self.run, self.model, self.trunk, self.load, self.score = run, model, trunk, load, score
        self.held_out_store = RolloutStore(store.experience_class)
        run.state.register("store", store, small=False)
        run.state.register("eval_store", self.held_out_store, small=False)
        for name, data in given.items():
            run.state.register(name, SameRows(data, fields, name))

    @torch.no_grad()
    def share(self, elements: Sequence[E], held_out: bool = False) -> Sequence[E]:
        """Return this process's share of samples that all processes have, with the reference's log-probabilities."""
        own = elements[self.run.world.rank :: self.run.world.size]
        if self.load is not None:
            self.load()
        # Checkpoints have no states that are in a file, so that a resumed run computes them from the samples. They are
        # computed in this way from the beginning, for the same bits.
        keep = self.trunk.place(own, False, held_out) is Place.MEMORY
        kept = KeptStates(as_columns(type(own[0]), own), None) if keep and len(own) else None
        states: list[Tensor | None] = []

        def under_reference(completions: Completion) -> Tensor:
            with self.run.forward("logprobs"):
                out = self.model(completions, reference=self.load is not None)
            states.append(out.trunk)
            return cast(Tensor, out.logprobs if self.load is None else out.ref_logprobs)

        made, order = [], []
        for numbers, part in parts_by_length(self.run, own):
            states.clear()
            self.score(part, under_reference)
            if kept is not None and states[0] is not None:
                kept.write(numbers, part, states[0])
            made.append(packed(type(part), part.to("cpu").split()))
            order.append(numbers)
        self.model.drop_reference()
        if not made:
            return own
        rows: ColumnRows[E] = ColumnRows.unpacked(type(own[0]), *made).taken(torch.cat(order).argsort())
        return rows if kept is None else kept.beside(rows)

    def held_out(self, sets: Mapping[str, Sequence[E]]) -> Mapping[str, Sequence[E]]:
        """Return held-out samples with the reference's log-probabilities, which are computed before the first step."""
        store, world = self.held_out_store, self.run.world
        if self.run.progress.step == 0:  # the policy is its own reference
            store.clear()
            store.push(self.share(list(chain.from_iterable(sets.values())), held_out=True))
            store.join(world.gather, world.size)
        bounds = [0, *accumulate(map(len, sets.values()))]
        return {name: store.elements[slice(*pair)] for name, pair in zip(sets, pairwise(bounds), strict=True)}
