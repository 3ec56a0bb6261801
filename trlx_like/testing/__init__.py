"""Checks for trainers, ours and those of plugins: `check_trainer(MyTrainer, config, reward_fn=..., prompts=...)`.

    from trlx_like.testing import GENERATION, PROMPTS, check_trainer, count_letters, tiny_run

    def test_my_trainer():
        config = tiny_run(MyTrainer, {"num_rollouts": 5, "gen_kwargs": GENERATION})
        check_trainer(MyTrainer, config, reward_fn=count_letters, prompts=PROMPTS)

A check raises an AssertionError with a sentence that says what is wrong, so any test runner will do. Described in
docs/extending.md. The trainers of this package are held to the same checks, in tests/contract.
"""

from __future__ import annotations

from trlx_like.testing.checks import TrainerChecks as TrainerChecks, check_trainer as check_trainer
from trlx_like.testing.ranks import on_ranks as on_ranks
from trlx_like.testing.tiny import (
    GENERATION as GENERATION,
    PROMPTS as PROMPTS,
    count_letters as count_letters,
    tiny_gpt2 as tiny_gpt2,
    tiny_run as tiny_run,
    tiny_tokenizer as tiny_tokenizer,
)
