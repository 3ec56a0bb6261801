"""Judges, which decide which of several completions of a prompt is better.

There are three kinds of judges, distinguished by their method: a judge ranks several completions, compares two, or
checks one.
`judged` asks a judge of any kind about groups of completions. `WinRate` makes a metric function of a judge, and
`GroupReward` a reward function. `RewardJudge` makes a judge of any reward function or reward model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from trlx_like.errors import ConfigError, RegistryError, RewardError, raised_as
from trlx_like.imports import import_name, is_python_name
from trlx_like.registry import Registry
from trlx_like.rewards.arguments import metadata_rows, name_of
from trlx_like.rewards.call import call_metric, call_reward
from trlx_like.rewards.judging import KINDS, judged, kind_of
from trlx_like.rewards.outcome import whole


class PairwiseJudge(Protocol):
    """Decide which of two completions is better.

    Like every judge, it gets the keywords that it accepts among the arguments below, `tokenizer`, and the prompts' own
    keys. Except for the tokenizer, each is a list with one entry per question.
    """

    def compare(self, *, prompts: list[str], pairs: list[tuple[str, str]], **metadata: Any) -> Sequence[int | None]:
        """Compare the two completions of each pair.

        Returns:
            For each pair the place of the better completion, 0 or 1; None for a tie, or if the judge cannot tell.
        """


class RankingJudge(Protocol):
    """Rank several completions of a prompt. It is called like a `PairwiseJudge`."""

    def rank(
        self, *, prompts: list[str], completions: list[list[str]], **metadata: Any
    ) -> Sequence[Sequence[float | None]]:
        """Rank the completions of each prompt.

        Returns:
            For each prompt the rank of each completion: smaller is better, equal is a tie, None is an abstention.
        """


class BinaryJudge(Protocol):
    """Decide whether a completion meets all requirements. It is called like a `PairwiseJudge`."""

    def check(self, *, prompts: list[str], completions: list[str], **metadata: Any) -> Sequence[bool | None]:
        """Return True or False for each completion, or None to abstain."""


Judge = PairwiseJudge | RankingJudge | BinaryJudge

JUDGES: Registry[Callable[..., Any]] = Registry(
    "judge",
    {
        "llm": "trlx_like.rewards.llm_judge:LLMJudge",
        "reward_model": "trlx_like.rewards.judges:RewardModelJudge",
    },
    gone={
        "pair_rm": "its package llm-blender does not run with today's transformers. Use a local reward model, {name: "
        "reward_model, model: FOLDER}, or a language model, {name: llm, url: ...} (see MIGRATING.md)."
    },
)
register_judge = JUDGES.register


class RewardJudge:
    """Judge by a reward function: the higher reward is better, and equal rewards are a tie.

    The judge abstains from a completion if the function does (None). Per-token rewards are summed.

    Args:
        reward_fn: A reward function as `train` takes it.
    """

    def __init__(self, reward_fn: Callable[..., Any]) -> None:
        self.reward_fn = reward_fn

    def rank(
        self, *, prompts: Sequence[str], completions: Sequence[Sequence[str]], tokenizer: Any = None, **metadata: Any
    ) -> list[list[float | None]]:
        """Rank the completions of each prompt by their rewards: the ranks are the rewards times -1."""
        places = [place for place, group in enumerate(completions) for _ in group]
        outputs = [output for group in completions for output in group]
        asked = [prompts[place] for place in places]
        texts = {"prompts": asked, "outputs": outputs, "samples": [p + o for p, o in zip(asked, outputs, strict=True)]}
        rewards = iter(call_reward(self.reward_fn, texts, metadata_rows(metadata, places), tokenizer))
        return [[None if (reward := whole(next(rewards))) is None else -reward for _ in group] for group in completions]


class RewardModelJudge(RewardJudge):
    """Judge by a reward model.

    Args:
        model: Its folder or hub name.
        **options: Options of `RewardModel`.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        from trlx_like.rewards.models import RewardModel

        super().__init__(RewardModel(model, **{"option": "judge.model", **options}))


def make_judge(spec: Any, option: str = "judge") -> Judge:
    """Make the judge that `spec` stands for.

    Args:
        spec: A judge; a reward function; the registered name of a judge, or a mapping with "name" and its options; or
            `module:name` or `file.py:name` of a judge, a class of judges, or a reward function.
        option: The name of `spec` in errors.

    Raises:
        ConfigError: `spec` is none of these.
        RegistryError: No judge is registered under the name.
    """
    options: dict[str, Any] = {}
    if isinstance(spec, (str, Mapping)):
        check_judge(spec, option)
    if isinstance(spec, Mapping):
        options = dict(spec)
        spec = options.pop("name")
    if isinstance(spec, str):
        made = import_name(spec, option) if is_python_name(spec) else JUDGES.get(spec)
        spec = _constructed(made, options, option) if isinstance(made, type) or spec in JUDGES else made
    if kind_of(spec) is not None:
        judge: Judge = spec
        return judge
    if callable(spec) and not isinstance(spec, type):
        return RewardJudge(spec)
    of_trl = " Derive TRL's kind from a class of trlx_like.compat.trl." if hasattr(spec, "judge") else ""
    raise ConfigError(
        f"{option} must be an object with a method {', '.join(KINDS[:-1])} or {KINDS[-1]}, a reward function, or a "
        f"name for one, not {spec!r}.{of_trl}"
    )


def check_judge(spec: Any, option: str = "judge") -> str:
    """Return the name of the judge that `make_judge` would make, without making it. Raises what `make_judge` does."""
    name = spec.get("name") if isinstance(spec, Mapping) else spec
    if not isinstance(name, str):
        raise ConfigError(f"{option}: a mapping needs the registered name of a judge under 'name'.")
    if is_python_name(name):
        import_name(name, option)
        return name
    try:
        return JUDGES.canonical(name)
    except RegistryError as error:
        raise RegistryError(
            f"{option}: {error} A reward function is named by its place, as rewards.py:name."
        ) from error


class GroupReward:
    """Reward each completion with the score that a judge gives it within its group.

    The scores are those of `judged`. The completions of a group have the same prompt and follow each other in the
    batch.

    Args:
        judge: A judge of any kind.
        group_size: Completions per group.
    """

    def __init__(self, judge: Any, group_size: int) -> None:
        self.judge = judge
        self.group_size = group_size

    def __call__(
        self, *, samples: Sequence[str], prompts: Sequence[str], outputs: Sequence[str], tokenizer: Any, **keys: Any
    ) -> list[float | None]:
        starts = range(0, len(outputs), self.group_size)
        groups = [outputs[start : start + self.group_size] for start in starts]
        asked = [prompts[start] for start in starts]
        scores = judged(self.judge, asked, groups, metadata_rows(keys, starts), tokenizer)
        return [score for group in scores for score in group]


class Wins:
    """Reward an output with 1 if a judge prefers it to a reference completion, 0 if not, and 0.5 for a tie.

    Args:
        judge: A judge of any kind.
        key: The key of the prompts that holds the reference completion.

    Raises:
        RewardError: A prompt has no reference completion.
    """

    def __init__(self, judge: Any, key: str) -> None:
        self.judge = judge
        self.key = key

    def __call__(
        self, *, prompts: Sequence[str], outputs: Sequence[str], tokenizer: Any = None, **metadata: Any
    ) -> list[float]:
        references = metadata.get(self.key, [None] * len(outputs))
        for prompt, reference in zip(prompts, references, strict=True):
            if not isinstance(reference, str):
                raise RewardError(
                    f"WinRate needs text under {self.key!r} with every evaluation prompt, as with {prompt!r}."
                )
        groups = [list(pair) for pair in zip(outputs, references, strict=True)]
        rows = metadata_rows(metadata, range(len(outputs)))
        return [_win(*scores) for scores in judged(self.judge, prompts, groups, rows, tokenizer)]


class WinRate:
    """Measure `win_rate`, the fraction of outputs that a judge prefers to a reference completion; a tie counts half.

    Args:
        judge: Anything that `make_judge` takes.
        key: The key of the evaluation prompts that holds the reference completion.
        also: Another metric function, whose metrics are added.

    Raises:
        RewardError: A prompt has no reference completion.
    """

    def __init__(self, judge: Any, *, key: str = "reference", also: Callable[..., Any] | None = None) -> None:
        self.also = also
        self.scored = {"win_rate": Wins(make_judge(judge), key)}
        """Metrics by reward functions, which an evaluation calls through the reward runner."""

    def __call__(
        self, *, samples: list[str], prompts: list[str], outputs: list[str], tokenizer: Any = None, **metadata: Any
    ) -> dict[str, list[float]]:
        more = {}
        if self.also is not None:
            texts = {"samples": samples, "prompts": prompts, "outputs": outputs}
            more = call_metric(self.also, texts, metadata_rows(metadata, range(len(outputs))), tokenizer)
        wins = self.scored["win_rate"](prompts=prompts, outputs=outputs, tokenizer=tokenizer, **metadata)
        return {**more, "win_rate": wins}


def _win(own: float | None, other: float | None) -> float:
    if own is None or other is None or own == other:
        return 0.5
    return float(own > other)


def _constructed(made: Callable[..., Any], options: dict[str, Any], option: str) -> Any:
    with raised_as(ConfigError, TypeError, f"{option}: {name_of(made)} cannot be made of {options or 'no options'}"):
        return made(**options)
