"""Former names that plugins may import or read are the same things as the present ones."""

from __future__ import annotations

import torch

from trlx_like.data import Sampled
from trlx_like.functional import bradley_terry
from trlx_like.samplers import engines, generators
from trlx_like.samplers.text import TextSamples


def test_engines_were_called_generators() -> None:
    assert generators.GENERATORS is engines.ENGINES
    assert generators.Generator is engines.Engine
    assert generators.TransformersGenerator is engines.TransformersEngine
    assert generators.register_generator == engines.register_engine


def test_sampling_logprobs_were_called_drawn() -> None:
    ids, mask, logprobs = torch.ones(1, 2, dtype=torch.int64), torch.ones(1, 2, dtype=torch.bool), torch.rand(1, 2)
    sampled = Sampled(ids, mask, ids, mask, sampling_logprobs=logprobs)
    samples = TextSamples(sampled, ["a"], ["b"], ["ab"], ["eos"], [{}], sampling_logprobs=logprobs)
    assert sampled.drawn is logprobs and samples.drawn is logprobs


def test_the_bradley_terry_loss_was_called_pair_loss() -> None:
    assert bradley_terry.pair_loss is bradley_terry.bradley_terry_loss
