"""How batches are read: the same scores and gradients as of whole rows, for every family, and fewer tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.recipes import make
from tests.tiny import FAMILIES, ODD_FAMILIES, SEQ2SEQ_FAMILIES, tiny_lm
from tests.unit.models.support import assert_equal_scores, batch_of_ids, scored, sharp_lm, valued_policy
from trlx_like.data import Completion, PreferenceExperience, RolloutStore
from trlx_like.models import compaction, pieces
from trlx_like.models.compaction import Compaction, compaction_of
from trlx_like.models.layout import blocks
from trlx_like.models.loading import checkpoint_activations
from trlx_like.models.packed_rows import PackedRows, RowPlan
from trlx_like.models.policy import LanguagePolicy
from trlx_like.models.shared_prompts import SharedPrompts
from trlx_like.trainers.sft import SFTExperience

UNPACKED = {"bloom": "takes a mask [B, T] alone"}
WINDOW = {"gemma2": {"sliding_window": 40}}


def pairs_of_rows() -> Completion:
    """Two responses each to prompts of 6, 1 and 3 tokens, and a prompt that stands alone."""
    prompts = batch_of_ids(((6, 1), (1, 1), (3, 1), (2, 1)))
    responses = batch_of_ids(tuple((1, length) for length in (7, 2, 3, 1, 5, 4, 1)), seed=7)
    rows = [0, 1, 2, 0, 1, 2, 3]
    return Completion(prompts.prompt[rows], prompts.prompt_mask[rows], responses.response, responses.mask)


def packing(lm: Any) -> Compaction:
    """What a model can do, with attention that costs next to nothing, so that all that saves tokens is done."""
    return replace(compaction_of(lm), share=False, in_pieces=0, hidden=10**6)


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Take long rows, as if calls of attention were free, and record the pieces of each call."""
    calls: list[int] = []
    whole = pieces._attend

    def attend(piece: pieces.Piece, *given: Any) -> torch.Tensor:
        if piece.prompt_piece is not None:
            calls.append(piece.length)
        return whole(piece, *given)

    monkeypatch.setattr(compaction, "KERNEL_CALL", 0)
    monkeypatch.setattr(pieces, "_attend", attend)
    return calls


def assert_scores_of_whole_rows(policy: Any, batch: Completion, able: Compaction | None = None) -> None:
    expected = scored(policy, batch)
    policy.compaction = able or packing(policy.lm)
    assert isinstance(policy.compaction.of(batch), PackedRows)
    found = scored(policy, batch)
    assert_equal_scores(found, expected)


@pytest.mark.parametrize("family", [family for family in FAMILIES + ODD_FAMILIES if family not in UNPACKED])
def test_scores_and_gradients_are_those_of_whole_rows(family: str) -> None:
    policy = valued_policy(sharp_lm(family, **WINDOW.get(family, {})))
    policy.add_reference()
    assert_scores_of_whole_rows(policy, pairs_of_rows())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_have_the_factors_of_the_longest_sample(attention: str, attended: list[int]) -> None:
    """Rows of up to 13 tokens take the long factors of a model of 8 positions, and of up to 8 the short ones."""
    lm = sharp_lm("phi3_longrope")
    lm.set_attn_implementation(attention)
    policy = valued_policy(lm)
    policy.add_reference()
    for batch in (pairs_of_rows(), batch_of_ids(((2, 6), (3, 1), (1, 1), (1, 3)))):
        for able in (packing(lm), replace(compaction_of(lm), hidden=10**6)):
            policy.compaction = None
            assert_scores_of_whole_rows(policy, batch, able)


IN_ONE_CALL = {
    "bloom": "takes a mask [B, T] alone",
    "falcon": "does not take its attention from the interface",
    "gemma2": "attends with eager attention",
}


@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES)
def test_attention_piece_by_piece(family: str, attended: list[int]) -> None:
    """All blocks attend to prompts of 6, 1, 3 and 2 tokens with 7, 2, 3 and 1, and then to 1, 5 and 4 further ones."""
    policy = valued_policy(sharp_lm(family, **WINDOW.get(family, {})))
    policy.add_reference()
    made = replace(compaction_of(policy.lm), hidden=10**6)
    assert (made.in_pieces == 0) == (family in IN_ONE_CALL)
    if made.in_pieces:
        attended.clear()
        assert_scores_of_whole_rows(policy, pairs_of_rows(), made)
        each = [13, 1, 3, 5, 6, 4, 3]
        assert sorted(attended) == sorted(each * (len(attended) // len(each))) and len(attended) > len(each)


READ: dict[str, Callable[[Any], Compaction]] = {
    "rows": lambda lm: Compaction(hidden=16, skips_unread=True),
    "packed": packing,
    "piece by piece": lambda lm: replace(compaction_of(lm), share=False, hidden=10**6),
    "prompts apart": lambda lm: replace(compaction_of(lm), longest=0, in_pieces=0),
}


def read_tokens(policy: LanguagePolicy, batch: Completion) -> list[int]:
    """Return how many tokens each pass of the first block reads for the scores of a batch."""
    counts: list[int] = []
    block = blocks(policy.lm)[0]
    hook = block.register_forward_hook(lambda module, args, made: counts.append(args[0].shape[:-1].numel()))
    policy(batch)
    hook.remove()
    return counts


@pytest.mark.parametrize("way", READ)
@pytest.mark.parametrize("family", FAMILIES + ODD_FAMILIES)
def test_the_last_token_of_a_response_is_not_read(family: str, way: str, attended: list[int]) -> None:
    """Responses of seven rows have 7, 2, 3, 1, 5, 4 and 1 tokens, prompts up to 6, and 4 prompts are different."""
    policy, batch = LanguagePolicy(sharp_lm(family, **WINDOW.get(family, {}))), pairs_of_rows()
    policy.add_reference()
    expected = scored(policy, batch)
    policy.compaction = replace(READ[way](policy.lm), skips_last=False)
    whole = sum(read_tokens(policy, batch))
    policy.compaction = replace(policy.compaction, skips_last=compaction_of(policy.lm).skips_last)
    assert policy.compaction.skips_last == (family != "phi3_longrope")
    assert_equal_scores(scored(policy, batch), expected)
    assert (sum(read_tokens(policy, batch)) < whole) == policy.compaction.skips_last


def test_with_gradient_checkpointing_the_last_token_is_left_out_too() -> None:
    """So the rows are the same with and without it."""
    policy, checkpointed, batch = *(LanguagePolicy(sharp_lm("gpt2").train()) for _ in range(2)), pairs_of_rows()
    checkpoint_activations(checkpointed.lm)
    for made in (policy, checkpointed):
        made.add_reference()
        made.compaction = replace(compaction_of(made.lm), in_pieces=0, share=False)
        assert made.compaction.skips_last and made.compaction.longest
    assert_equal_scores(scored(checkpointed, batch), scored(policy, batch))
    assert read_tokens(checkpointed, batch) == read_tokens(policy, batch)


def test_the_last_token_is_read_where_something_depends_on_it() -> None:
    """Values and states after it, blocks whose results may be kept, and rows of a multiple of 16 tokens."""
    batch, able = batch_of_ids(((3, 4), (3, 4))), Compaction(hidden=16, skips_last=True)
    even, single = batch_of_ids(((10, 6), (10, 6))), batch_of_ids(((3, 1), (2, 1)))
    policy = LanguagePolicy(sharp_lm("gpt2"))
    policy.compaction = able
    assert [sum(read_tokens(policy, rows)) for rows in (batch, even, single)] == [12, 32, 8]
    assert policy(batch, states=True).states.shape[:2] == (2, 5)
    valued, frozen = valued_policy(sharp_lm("gpt2")), LanguagePolicy(sharp_lm("gpt2"), num_layers_unfrozen=1)
    lowest = LanguagePolicy(sharp_lm("gpt2"))
    blocks(lowest.lm)[0].requires_grad_(False)
    for other in (valued, frozen, LanguagePolicy(lowest.lm)):
        other.compaction = able
        assert sum(read_tokens(other, batch)) == 14
    assert valued(batch).heads["value"].shape == (2, 5)


OPTIONS: dict[str, dict[str, Any]] = {
    "top": {"num_layers_unfrozen": 1},
    "heads": {"num_layers_unfrozen": 0},
    "value branch": {"head_blocks": {"value": 1}},
    "temperature": {"temperature": 0.7},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_every_part_of_a_policy(options: dict[str, Any], attention: str) -> None:
    lm = sharp_lm("llama")
    lm.set_attn_implementation(attention)
    policy = valued_policy(lm, **options)
    policy.add_reference()
    assert_scores_of_whole_rows(policy, pairs_of_rows())


def test_every_part_of_a_policy_piece_by_piece(attended: list[int]) -> None:
    for options in OPTIONS.values():
        policy = valued_policy(sharp_lm("llama"), **options)
        policy.add_reference()
        assert_scores_of_whole_rows(policy, pairs_of_rows(), replace(compaction_of(policy.lm), hidden=10**6))
        assert attended
        attended.clear()


def test_rows_longer_than_the_positions(attended: list[int]) -> None:
    """Positions start again, so a row may be longer than they are. A model that computes them from places may not."""
    lm = sharp_lm("gpt2")
    made = compaction_of(lm)
    assert made.longest == 64 and made.in_pieces > 10**6
    rows = batch_of_ids(((20, 20), (20, 10), (10, 20)))
    policy = valued_policy(lm)
    policy.add_reference()
    attended.clear()
    assert_scores_of_whole_rows(policy, rows, replace(made, hidden=10**6))
    assert sorted(set(attended)) == [30, 40]

    def limited(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        assert kwargs["input_ids"].shape[1] <= 64

    transformer: Any = lm.transformer
    transformer.register_forward_pre_hook(limited, with_kwargs=True)
    assert compaction_of(lm).in_pieces == compaction_of(lm).longest == 64
    assert compaction_of(sharp_lm("llama", max_position_embeddings=2048)).in_pieces == 2048


@pytest.mark.parametrize(("name", "module"), [("SFTTrainer", "text"), ("RewardTrainer", "reward")])
def test_a_model_that_will_run_on_a_gpu_does_not_attend_in_pieces(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trainers choose how batches are read before they bring the model to the device."""
    asked: list[Any] = []

    def noted(*given: Any) -> Compaction:
        asked.append(given[2])
        return compaction_of(*given)

    monkeypatch.setattr(f"trlx_like.trainers.{module}.compaction_of", noted)
    trainer = make(name, tmp_path)
    assert asked == [trainer.device]
    lm = sharp_lm("gpt2")
    assert compaction_of(lm).in_pieces > 0 and compaction_of(lm, device=torch.device("cuda")).in_pieces == 0


def test_with_gradient_checkpointing_attention_is_not_in_pieces(attended: list[int]) -> None:
    lm = sharp_lm("gpt2")
    checkpoint_activations(lm)
    assert compaction_of(lm.train()).in_pieces == 0 and compaction_of(lm).longest == 64


def test_a_group_is_one_document(attended: list[int]) -> None:
    """Of 4 prompts of 60 tokens with 3 responses of 20 each, 4 x 120 tokens are read, in a row."""
    batch = batch_of_ids(((60, 20),) * 12)
    for row in range(12):
        batch.prompt[row] = batch.prompt[row % 4]
    able = Compaction(hidden=1000, longest=128, in_pieces=2048)
    compact = able.of(batch)
    assert isinstance(compact, PackedRows) and compact.source.shape == (1, 480)
    assert compact.inputs["attention_mask"] in pieces._PIECES
    made = pieces._PIECES[compact.inputs["attention_mask"]]
    assert [(piece.length, piece.prompt_length, piece.count) for piece, _ in made] == [(80, 0, 1), (20, 60, 2)] * 4


@pytest.mark.parametrize("shape", [(16, 60, 60), (8, 128, 128), (1, 300, 300)])
def test_rows_without_padding_are_read_as_they_are(shape: tuple[int, int, int]) -> None:
    """They have no mask either, so attention costs no more than piece by piece."""
    rows, prompt, response = shape
    able = Compaction(hidden=32, longest=4096, in_pieces=4096)
    assert able.of(batch_of_ids(((prompt, response),) * rows)) is None


def test_eager_attention_computes_what_is_not_seen() -> None:
    """2 H = 320. A row of 100 tokens costs 131.25, and two of 60 cost .95 * 120 * (1 + 60 / 320) = 135.4, or 130.4."""
    batch = batch_of_ids(((20, 40),) * 4)
    batch.prompt[1], batch.prompt[3] = batch.prompt[0], batch.prompt[2]
    able = Compaction(hidden=160, longest=200)
    assert able.of(batch) is None
    assert isinstance(replace(able, bias=torch.float32).of(batch), PackedRows)


def test_a_call_costs_more_tokens_of_a_narrow_model() -> None:
    """64 rows of 12 to 28 tokens: their 64 calls cost 64 * 38 tokens with 32 hidden states, and 64 * 2 with 768."""
    rows = batch_of_ids(tuple((length, 20 - length // 2) for length in (8, 8, 16, 4) * 16))
    narrow, wide = (Compaction(hidden=hidden, longest=64, in_pieces=4096) for hidden in (32, 768))
    in_pieces = []
    for able in (narrow, wide):
        compact = able.of(rows)
        in_pieces.append(isinstance(compact, PackedRows) and compact.inputs["attention_mask"] in pieces._PIECES)
    assert in_pieces == [False, True]


def test_rows_may_get_a_multiple_of_sixteen_tokens_unless_states_are_kept() -> None:
    """Of 11, 5, 11 and 5 tokens: two rows of 16, or three of 11. Rows of 14 tokens do not become longer."""
    able, batch = Compaction(hidden=144, longest=64), batch_of_ids(((1, 10), (1, 4), (1, 10), (1, 4)))
    for branches, shape in ((False, (2, 16)), (True, (3, 11))):
        compact = able.of(batch, branches)
        assert isinstance(compact, PackedRows) and compact.source.shape == shape
    compact = able.of(batch_of_ids(((10, 4), (2, 5), (5, 2), (4, 10))))
    assert isinstance(compact, PackedRows) and compact.source.shape == (3, 14)
    compact = replace(able, longest=15).of(batch)
    assert isinstance(compact, PackedRows) and compact.source.shape == (3, 11)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_scores_in_rows_of_sixteen_tokens(family: str) -> None:
    policy = valued_policy(sharp_lm(family))
    policy.add_reference()
    assert_scores_of_whole_rows(policy, batch_of_ids(((1, 10), (1, 4), (1, 10), (1, 4))))
    assert policy.compaction is not None
    compact = policy.compaction.of(batch_of_ids(((1, 10), (1, 4), (1, 10), (1, 4))))
    assert isinstance(compact, PackedRows) and compact.source.shape == (2, 16)


@pytest.mark.parametrize(
    ("able", "lengths", "most"),
    [
        (Compaction(hidden=1000, longest=64, in_pieces=64), (*((30, 30),) * 299, (30, 29)), 14),
        (Compaction(hidden=1000, longest=64, in_pieces=1024), (*((3, 4),) * 100, (5, 6)), 6),
        (Compaction(hidden=144, longest=64, in_pieces=1024), (*((3, 4),) * 100, (5, 6)), 4),
    ],
    ids=["several long rows", "one long row", "calls for pieces cost more than all that could be saved"],
)
def test_few_plans_are_made_for_many_rows(
    able: Compaction, lengths: tuple[tuple[int, int], ...], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, planned = RowPlan.of, 0

    def count(*given: Any, **options: Any) -> Any:
        nonlocal planned
        planned += 1
        return plan(*given, **options)

    monkeypatch.setattr(RowPlan, "of", count)
    able.of(batch_of_ids(lengths))
    assert 0 < planned <= most


def test_long_samples_and_large_groups(attended: list[int]) -> None:
    """A group has `LONG_ROW` tokens at most, and a row about as many unless a sample is longer."""
    able = Compaction(hidden=1000, longest=10**5, in_pieces=10**5)
    group = batch_of_ids(((20, 100),) * 30)
    group.prompt[:] = group.prompt[0]
    compact = able.of(group)
    assert isinstance(compact, PackedRows) and compact.source.shape == (3, 1020)
    compact = able.of(batch_of_ids(((3000, 1000), *((20, 100),) * 20)))
    assert isinstance(compact, PackedRows) and compact.source.shape == (2, 4000)


def test_another_reference_and_gradient_checkpointing() -> None:
    lm = sharp_lm("gpt2")
    checkpoint_activations(lm)
    policy = valued_policy(lm.train())
    policy.add_reference(sharp_lm("llama", seed=1))
    assert_scores_of_whole_rows(policy, pairs_of_rows())


def test_kept_states() -> None:
    """States that come from packed rows are those of the batch, and packed rows start from them."""
    policy = valued_policy(sharp_lm("llama"), num_layers_unfrozen=1)
    policy.add_reference()
    assert policy.add_trunk() is None and policy.trunk is not None
    batch = pairs_of_rows()
    expected = policy.trunk.states(batch.inputs())
    whole = scored(policy, batch)
    policy.compaction = packing(policy.lm)
    kept = policy(batch).trunk
    assert kept is not None
    real = batch.inputs()["attention_mask"].bool()
    assert torch.allclose(kept[real], expected[real], atol=1e-5)
    batch.keep(kept)
    assert_equal_scores(scored(policy, batch), whole)


@pytest.mark.parametrize("family", [*UNPACKED, *SEQ2SEQ_FAMILIES])
def test_models_that_read_whole_rows(family: str) -> None:
    assert compaction_of(sharp_lm(family)).longest == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_does_not_follow_the_mask_reads_whole_rows(dtype: torch.dtype) -> None:
    lm = tiny_lm("llama")  # with the small weights of its initialisation
    lm = lm.bfloat16() if dtype == torch.bfloat16 else lm
    assert compaction_of(lm).longest == 64

    def forget(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        mask = kwargs["attention_mask"]
        return args, {**kwargs, "attention_mask": torch.ones_like(mask).tril() if mask.dim() == 4 else mask}

    lm.model.register_forward_pre_hook(forget, with_kwargs=True)
    assert compaction_of(lm).longest == 0


def test_dropout_reads_whole_rows() -> None:
    made = compaction_of(tiny_lm("gpt2", resid_pdrop=0.1))
    assert made.longest == 0 and not made.share


def test_sharded_weights_are_read_in_one_pass() -> None:
    made = compaction_of(sharp_lm("gpt2"), sharded=True)
    assert made.longest == 64 and not made.share


def test_a_packed_row_is_in_the_window() -> None:
    """The window counts places in the row, and a second answer is further from the prompt than its positions say."""
    made = compaction_of(sharp_lm("gemma2", sliding_window=12))
    assert made.longest == 12
    batch = batch_of_ids(((4, 6), (4, 6), (1, 1), (1, 1)))
    batch.prompt[1] = batch.prompt[0]
    compact = replace(made, share=False, hidden=10**6).of(batch)
    assert isinstance(compact, PackedRows) and compact.inputs["input_ids"].shape == (3, 10)  # the pair has 16 tokens
    assert replace(made, share=False, hidden=10**6, longest=9).of(batch) is None


def test_a_reference_limits_both() -> None:
    made = compaction_of(sharp_lm("gpt2"))
    assert made.also_of(sharp_lm("llama")) == made
    assert made.also_of(sharp_lm("gemma2", sliding_window=40)).longest == 0  # whose attention takes another mask
    assert made.also_of(sharp_lm("llama", max_position_embeddings=32)).longest == 32
    other = made.also_of(sharp_lm("t5"))
    assert other.longest == 0 and not other.share


def test_rows_of_one_length_are_read_as_they_are() -> None:
    assert compaction_of(sharp_lm("gpt2")).of(batch_of_ids(((3, 4),) * 4)) is None


def test_the_cheapest_is_taken() -> None:
    """2 H = 2000, so 8 rows of 60 + 20 tokens cost 640 * 1.04 = 665.6.

    As pairs: 4 * 100 * 1.05 = 420. With the prompts apart: 1.15 * (4 * 60 * 1.03 + 8 * 20 * 1.04) = 475.6. If all have
    one prompt, that is 1.15 * (60 * 1.03 + 8 * 20 * 1.04) = 262.4.
    """
    batch = batch_of_ids(((60, 20),) * 8)
    able = Compaction(hidden=1000, share=True, longest=128)
    assert able.of(batch) is None
    for row in range(4):
        batch.prompt[row + 4] = batch.prompt[row]
    assert isinstance(able.of(batch), PackedRows)
    assert isinstance(replace(able, longest=99).of(batch), SharedPrompts)
    assert able.of(batch, branches=True) is not None
    assert replace(able, longest=99).of(batch, branches=True) is None
    batch.prompt[:] = batch.prompt[0]
    assert isinstance(able.of(batch), SharedPrompts)


def packed_before() -> SFTExperience:
    """Rows of samples of 5, 5 and 3 tokens, and of 4 and 2 tokens and 7 of padding, learned but for their first."""
    numbers = torch.tensor([[0] * 5 + [1] * 5 + [2] * 3, [0] * 4 + [1] * 2 + [-1] * 7])  # [B, W]
    ids = batch_of_ids(((1, 12), (1, 12)))
    learned = numbers.diff(dim=1) == 0
    mask = numbers[:, 1:] >= 0
    return SFTExperience(ids.prompt, ids.prompt_mask, ids.response, mask, target=learned & mask, segment=numbers[:, 1:])


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in (*IN_ONE_CALL, "opt")])
def test_rows_that_were_packed_before_are_attended_to_piece_by_piece(family: str, attended: list[int]) -> None:
    policy = valued_policy(sharp_lm(family))
    policy.add_reference()
    able = replace(compaction_of(policy.lm), hidden=8)
    attended.clear()
    assert_scores_of_whole_rows(policy, packed_before(), able)
    each = [5, 5, 3, 4, 2]  # not the padding
    assert sorted(attended) == sorted(each * (len(attended) // len(each))) and len(attended) > len(each)


def test_rows_that_were_packed_before_are_read_to_their_last_token() -> None:
    policy, batch = LanguagePolicy(sharp_lm("llama")), packed_before()
    expected = policy(batch).logprobs
    policy.compaction = compaction_of(policy.lm)
    assert policy.compaction.skips_last and (batch.prompt.shape[1] + batch.response.shape[1]) % 16
    torch.testing.assert_close(policy(batch).logprobs, expected)
    assert sum(read_tokens(policy, batch)) == len(batch) * (batch.prompt.shape[1] + batch.response.shape[1])


def test_kept_states_of_rows_that_were_packed_before(attended: list[int]) -> None:
    policy = valued_policy(sharp_lm("llama"), num_layers_unfrozen=1)
    policy.add_reference()
    assert policy.add_trunk() is None and policy.trunk is not None
    batch = packed_before()
    batch.keep(policy.trunk.states(batch.inputs()))
    able = replace(compaction_of(policy.lm), hidden=8)
    attended.clear()
    assert_scores_of_whole_rows(policy, batch, able)
    assert sorted(set(attended)) == [2, 3, 4, 5]


@pytest.mark.parametrize(
    "able",
    [
        Compaction(hidden=144, longest=2048),  # as on GPUs, where positions tell the kernel
        Compaction(hidden=144, longest=2048, in_pieces=12),
        Compaction(hidden=8, longest=2048, in_pieces=2048),  # calls cost more than the mask
        Compaction(hidden=10**6, longest=2048, in_pieces=2048),  # attention costs nothing beside the rest
    ],
)
def test_rows_that_were_packed_before_are_read_as_they_are(able: Compaction) -> None:
    assert able.of(packed_before()) is None


def varied(rng: random.Random, median: int, most: int) -> torch.Tensor:
    """Tokens of a log-normal number, as dialogues that people compare have (HH-RLHF, Bai et al. 2022)."""
    length = round(median * 2.718281828 ** rng.gauss(0, 0.8))
    return torch.tensor([rng.randrange(2000) for _ in range(max(2, min(most, length)))])


def computed_per_token(
    store: RolloutStore[Any], batch_size: int, by_length: bool, in_pieces: int = 0
) -> tuple[float, float]:
    """Tokens that a model of width 144 computes for each real one, with padded rows and as it chooses."""
    real = padded = computed = 0
    for batch in store.batches(batch_size, torch.Generator().manual_seed(0), by_length=by_length):
        rows = batch.completions()  # type: ignore[union-attr]
        compact = Compaction(hidden=144, longest=1024, in_pieces=in_pieces).of(rows)
        whole = rows.inputs()["attention_mask"]
        real, padded = real + int(whole.sum()), padded + whole.numel()
        computed += compact.source.numel() if isinstance(compact, PackedRows) else whole.numel()
    return padded / real, computed / real


@pytest.mark.parametrize(
    ("by_length", "in_pieces", "least", "most"),
    [(False, 0, 2.0, 0.9), (True, 0, 1.5, 0.75), (False, 1024, 2.0, 0.7), (True, 1024, 1.5, 0.7)],
)
@pytest.mark.parametrize("batch_size", [8, 32])
def test_tokens_that_pairs_of_mixed_lengths_compute(
    batch_size: int, by_length: bool, in_pieces: int, least: float, most: float
) -> None:
    """Real tokens count the prompt of a pair twice, as it is in both rows."""
    rng, store = random.Random(0), RolloutStore(PreferenceExperience)
    for _ in range(320):
        sides = varied(rng, 90, 384), varied(rng, 45, 127), varied(rng, 45, 127)
        columns = [column for ids in sides for column in (ids, torch.ones_like(ids).bool())]
        store.push([PreferenceExperience(*columns)])
    padded, computed = computed_per_token(store, batch_size, by_length, in_pieces)
    assert padded > least and computed < most


@pytest.mark.parametrize(
    ("by_length", "in_pieces", "least", "most"),
    [(False, 0, 1.8, 1.25), (True, 0, 1.3, 1.05), (False, 1024, 1.8, 1.05), (True, 1024, 1.3, 1.05)],
)
@pytest.mark.parametrize("batch_size", [8, 32])
def test_tokens_that_rows_of_mixed_lengths_compute(
    batch_size: int, by_length: bool, in_pieces: int, least: float, most: float
) -> None:
    rng, store = random.Random(0), RolloutStore(Completion)
    for _ in range(960):
        prompt, response = varied(rng, 90, 384), varied(rng, 45, 127)
        store.push([Completion(prompt, torch.ones_like(prompt).bool(), response, torch.ones_like(response).bool())])
    padded, computed = computed_per_token(store, batch_size, by_length, in_pieces)
    assert padded > least and computed < most
