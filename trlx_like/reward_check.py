"""What `trlx-like test-reward` does: calls the reward function of a run on outputs of its model and on edge cases.

It finds rewards that fail, change from call to call, depend on the other samples of the batch, are the same for all
outputs of a prompt, or are high for text that nobody wants. Left out on purpose: whether it measures what is meant.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

from trlx_like import api
from trlx_like.check import quiet
from trlx_like.config import TRLConfig
from trlx_like.errors import ConfigError
from trlx_like.rewards.call import run_calls
from trlx_like.rewards.outcome import Call, Fault, Outcome

Row = Mapping[str, Any]
Score = Callable[[Sequence[Row]], list[Outcome]]
SLOW = 1.0
"""Seconds per sample above which a reward function is called slow."""
LARGE = 100.0
"""Absolute reward above which the scale is called large."""
GIBBERISH = "}{ qzx ;; %% 0x#~ vvkj @@"


def edge_cases(output: str, prompt: str) -> dict[str, str]:
    """Return texts that a model may produce, by what is wrong with each.

    Args:
        output: An output of the model.
        prompt: Its prompt.
    """
    word = (output.split() or ["the"])[0]
    return {
        "an empty output": "",
        "a cut output": output[: len(output) // 2],
        "one word 60 times": " ".join([word] * 60),
        "an output of 5000 characters": (f"{output or word} " * 5000)[:5000],
        "Japanese and Russian": "これは日本語の答えです。 Это ответ.",
        "a copy of the prompt": prompt,
        "gibberish": GIBBERISH,
    }


def check_rewards_of(score: Score, rows: Sequence[Row], group: int, encode: Callable[[str], list[int]]) -> list[str]:
    """Test a reward function on samples and edge cases, and describe what was found.

    Args:
        score: Calls the reward function on samples; a failure is a `Fault` in place of a reward.
        rows: Outputs of the model, as `TextSamples.rows` gives them.
        group: The number of outputs for each prompt, which follow each other.
        encode: Tokenises an output.

    Returns:
        One line for each problem, each beginning with "PROBLEM: ", and two lines of numbers before them.
    """
    since = time.perf_counter()
    first = score(rows)
    seconds = (time.perf_counter() - since) / len(rows)
    found = [f"{len(rows)} outputs, {seconds:.2g} s each"]
    problems = _faults(first, "outputs of the model")
    rewards = [_total(outcome) for outcome in first]
    given = [reward for reward in rewards if reward is not None]
    if not given:
        none = [] if problems else ["no output got a reward"]
        return [*found, *(f"PROBLEM: {problem}" for problem in [*problems, *none])]
    found.append(f"rewards from {min(given):.4g} to {max(given):.4g}, mean {statistics.fmean(given):.4g}")
    if len(given) < len(rewards) / 2:
        problems.append(f"{len(rewards) - len(given)} of {len(rewards)} outputs got no reward")
    if seconds > SLOW:
        problems.append(f"a reward takes {seconds:.2g} s; set reward.workers to score while text is generated")
    if max(map(abs, given)) > LARGE:
        problems.append(f"rewards up to {max(map(abs, given)):.4g} are large; scale them to about 1")
    if not _same(rewards, [_total(outcome) for outcome in score(rows)]):
        problems.append("a second call gives the same outputs other rewards: it is random, or keeps state")
    else:
        backwards = [_total(outcome) for outcome in score(rows[::-1])][::-1]
        alone = [_total(score([row])[0]) for row in rows[: 2 * group]]
        if not _same(rewards, backwards):
            problems.append("the order of the batch changes rewards: they land on other samples, or follow its place")
        elif not _same(rewards[: len(alone)], alone):
            problems.append("an output alone gets another reward than in a batch")
    problems += _spread(rewards, group)
    problems += _edges(score, rows[0], encode, given)
    return [*found, *(f"PROBLEM: {problem}" for problem in problems)]


def _spread(rewards: Sequence[float | None], group: int) -> list[str]:
    """Describe rewards that do not tell the outputs of one prompt apart."""
    groups = [[r for r in rewards[at : at + group] if r is not None] for at in range(0, len(rewards), group)]
    equal = [math.isclose(min(some), max(some), rel_tol=1e-6, abs_tol=1e-9) for some in groups if len(some) > 1]
    if equal and all(equal):
        return ["all outputs of a prompt get the same reward: there is nothing to learn from"]
    return []


def _edges(score: Score, row: Row, encode: Callable[[str], list[int]], given: Sequence[float]) -> list[str]:
    """Describe what the edge cases get: failures, and more than the model's own outputs."""
    problems, best, usual = [], max(given), statistics.median(given)
    for name, text in edge_cases(row["outputs"], row["prompts"]).items():
        ids = encode(text)
        edge = {**row, "outputs": text, "samples": row["prompts"] + text, "output_ids": ids, "length": len(ids)}
        (outcome,) = score([edge])
        problems += _faults([outcome], name)
        reward = _total(outcome)
        if reward is None or min(given) == best:
            continue
        if reward > best + 1e-9 * max(1.0, abs(best)):
            problems.append(f"{name} gets {reward:.4g}, more than every output of the model ({best:.4g})")
        elif name in ("gibberish", "an empty output") and reward > usual:
            problems.append(f"{name} gets {reward:.4g}, more than most outputs of the model (median {usual:.4g})")
    return problems


def _faults(outcomes: Sequence[Outcome], place: str) -> list[str]:
    kinds = {outcome.kind: outcome for outcome in outcomes if isinstance(outcome, Fault)}
    return [f"on {place}: {fault.message}" for fault in kinds.values()]


def _total(outcome: Outcome) -> float | None:
    if isinstance(outcome, Fault) or outcome is None:
        return None
    if isinstance(outcome, list):  # numbers, or spans whose last entry is a number
        return sum(entry[-1] if isinstance(entry, tuple) else entry for entry in outcome)
    return outcome


def _same(first: Sequence[float | None], second: Sequence[float | None]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(
        one is other or (one is not None and other is not None and math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-6))
        for one, other in pairs
    )


def reward_check(config: TRLConfig, prompts: int = 4, group: int = 4) -> list[str]:
    """Sample outputs with the start model of a run, and test its reward function on them.

    Args:
        config: The complete configuration.
        prompts: The number of prompts.
        group: The number of outputs for each.

    Returns:
        The lines of a report.

    Raises:
        TrlxError: What the run would raise when it is made.
        ConfigError: The run has no reward function, or does not sample text.
    """
    from trlx_like.trainers.scoring import argument_columns

    if config.data.reward_fn is None:
        raise ConfigError("test-reward needs data.reward_fn; judges and rewards of given samples are not tested.")
    with tempfile.TemporaryDirectory() as folder, quiet(), redirect_stdout(StringIO()):
        trainer: Any = api.make_trainer(config.elsewhere(folder))
        stream = getattr(trainer, "prompts", None)
        pipeline = getattr(stream, "pipeline", None) or getattr(trainer, "eval_pipeline", None)
        if pipeline is None or not hasattr(trainer, "sampler"):
            raise ConfigError(f"test-reward needs a trainer that samples text, not {config.train.trainer}.")
        chosen = list(range(min(prompts, len(pipeline))))
        batch = pipeline[chosen].repeated(group)
        trainer.model.eval()
        with trainer.run.backend.sampling():
            trainer.sync_sampler()
            rows = trainer.sampler.sample(batch, trainer.experience_kwargs, 0).rows()
        function, tokenizer = trainer.reward_fn, trainer.tokenizer

        def score(some: Sequence[Row]) -> list[Outcome]:
            (outcomes,) = run_calls([Call(function, *argument_columns(function, some, tokenizer))], tokenizer)
            return outcomes

        lines = check_rewards_of(score, rows, group, lambda text: tokenizer(text, add_special_tokens=False).input_ids)
        rewards = score(rows)
    problems = [line for line in lines if line.startswith("PROBLEM")]
    shown = sorted(zip(rewards, rows, strict=True), key=lambda pair: _total(pair[0]) or 0.0)
    samples = [f"  {_words(reward):>8}  {row['prompts']!r:.40} -> {row['outputs']!r:.60}" for reward, row in shown[::4]]
    verdict = f"{len(problems)} problem{'s' * (len(problems) != 1)}" if problems else "OK: no problem was found"
    return [*lines, "samples, from the lowest reward to the highest:", *samples, verdict]


def _words(outcome: Outcome) -> str:
    total = _total(outcome)
    return "none" if total is None else f"{total:.4g}"
