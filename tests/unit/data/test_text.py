"""Completions: ids and masks of a prompt and a response."""

from __future__ import annotations

from dataclasses import replace

import torch

from trlx_like.data import Completion, padded_right
from trlx_like.data.text import Sampled


def test_padding_moves_to_the_right_and_the_order_stays() -> None:
    ids, mask = padded_right(
        torch.tensor([[1, 1, 5, 6, 7], [2, 3, 4, 5, 6], [0, 0, 0, 0, 9]]),
        torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]).bool(),
    )
    assert ids.tolist() == [[5, 6, 7, 1, 1], [2, 3, 4, 5, 6], [9, 0, 0, 0, 0]]
    assert mask.sum(dim=1).tolist() == [3, 5, 1] and not (mask[:, 1:] & ~mask[:, :-1]).any()


def completions() -> Completion:
    """Prompts of two and one tokens, responses of one and three."""
    rows = [([5, 6], [7]), ([4], [1, 2, 3])]
    elements = []
    for prompt, response in rows:
        masks = [torch.ones(len(ids), dtype=torch.bool) for ids in (prompt, response)]
        elements.append(Completion(torch.tensor(prompt), masks[0], torch.tensor(response), masks[1]))
    return Completion.collate(elements)


def test_a_batch_pads_prompts_left_and_responses_right() -> None:
    batch = completions()
    assert batch.prompt.tolist() == [[5, 6], [0, 4]]
    assert batch.prompt_mask.tolist() == [[True, True], [False, True]]
    assert batch.response.tolist() == [[7, 0, 0], [1, 2, 3]]
    assert batch.mask.tolist() == [[True, False, False], [True, True, True]]
    assert torch.equal(batch.scored, batch.mask)
    assert [row.prompt.tolist() for row in batch.split()] == [[5, 6], [4]]
    assert [row.prompt_mask.tolist() for row in batch.split()] == [[True, True], [True]]
    assert [row.response.tolist() for row in batch.split()] == [[7], [1, 2, 3]]


def test_inputs_of_a_causal_model_golden() -> None:
    inputs = {name: tensor.tolist() for name, tensor in completions().inputs().items()}
    assert inputs == {
        "input_ids": [[5, 6, 7, 0, 0], [0, 4, 1, 2, 3]],
        "attention_mask": [[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]],
        "position_ids": [[0, 1, 2, 2, 2], [0, 0, 1, 2, 3]],
    }


def test_inputs_of_an_encoder_and_decoder_golden() -> None:
    inputs = {name: tensor.tolist() for name, tensor in completions().inputs(start=9).items()}
    assert inputs == {
        "input_ids": [[5, 6], [4, 0]],
        "attention_mask": [[1, 1], [1, 0]],
        "decoder_input_ids": [[9, 7, 0, 0], [9, 1, 2, 3]],
        "decoder_attention_mask": [[1, 1, 0, 0], [1, 1, 1, 1]],
    }


def test_previous_tokens_golden() -> None:
    assert completions().previous().tolist() == [[6, 7, 0], [4, 1, 2]]
    assert completions().previous(start=9).tolist() == [[9, 7, 0], [9, 1, 2]]
    batch = Completion(*(torch.tensor([ids]) for ids in ([1, 2, 3], [True] * 3, [4, 5], [True] * 2)))
    assert (batch.previous().tolist(), batch.previous(start=9).tolist()) == ([[3, 4]], [[9, 4]])


def test_kept_states_and_sets_of_tokens_are_padded_beside_their_tokens() -> None:
    """States of width 2 lie left and right as prompts and responses do; sets go by words, not by tokens."""
    batch = completions()
    assert batch.trunk is None
    batch.keep(torch.arange(1.0, 21).reshape(2, 5, 2) * torch.cat([batch.prompt_mask, batch.mask], dim=1)[..., None])
    assert batch.prompt_trunk is not None and batch.response_trunk is not None and batch.trunk is not None
    assert batch.prompt_trunk.tolist() == [[[1, 2], [3, 4]], [[0, 0], [13, 14]]]
    assert batch.response_trunk.tolist() == [[[5, 6], [0, 0], [0, 0]], [[15, 16], [17, 18], [19, 20]]]
    assert batch.trunk.tolist() == torch.cat([batch.prompt_trunk, batch.response_trunk], dim=1).tolist()
    assert replace(batch, response_trunk=None).trunk is None and replace(batch, prompt_trunk=None).trunk is None

    batch.choices, batch.choice_sizes = torch.tensor([[8, 9, 0], [1, 2, 3]]), torch.tensor([[2, 0, 0], [1, 1, 1]])
    rows = batch.split()

    def of(name: str) -> list[list[object]]:
        return [getattr(row, name).tolist() for row in rows]

    assert (of("choices"), of("choice_sizes")) == ([[8, 9], [1, 2, 3]], [[2], [1, 1, 1]])
    assert of("prompt_trunk") == [[[1, 2], [3, 4]], [[13, 14]]]
    assert [len(states) for states in of("response_trunk")] == [1, 3]
    again = Completion.collate(rows).trunk
    assert again is not None and torch.equal(again, batch.trunk)


def test_an_engine_need_not_report_log_probabilities() -> None:
    batch = completions()
    sampled = Sampled(batch.prompt, batch.prompt_mask, batch.response, batch.mask)
    assert sampled.sampling_logprobs is None and sampled.drawn is None
