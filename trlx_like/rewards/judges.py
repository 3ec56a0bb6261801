"""Judges: what says which answers to a prompt are better, where a number for each would be too much to ask.

A judge is of one of three kinds, known by the method it has: it ranks several answers, compares two, or checks one.
`judged` asks a judge of any kind about groups of answers; `WinRate` is a metric function and `GroupReward` a reward
function that are made of a judge. Any reward function or reward model makes a judge: `RewardJudge`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, Protocol, SupportsIndex

from trlx_like.errors import ConfigError, RegistryError, RewardError
from trlx_like.imports import import_name, is_python_name
from trlx_like.registry import Registry
from trlx_like.rewards.call import accepted, call_metric, call_reward, columns, name_of


class PairwiseJudge(Protocol):
    """Says which of two completions is better.

    Like all judges it is called with keywords, those that it accepts of these, `tokenizer` and the prompts' own keys,
    each a list with one entry for every prompt that it is asked about.
    """

    def compare(self, *, prompts: list[str], pairs: list[tuple[str, str]], **metadata: Any) -> Sequence[int | None]:
        """0 or 1, whichever of a pair is better; None: neither is, or there is no telling."""
        ...


class RankingJudge(Protocol):
    """Puts several completions in an order."""

    def rank(
        self, *, prompts: list[str], completions: list[list[str]], **metadata: Any
    ) -> Sequence[Sequence[float | None]]:
        """The place of each completion of each prompt: smaller is better, equal is a tie; None: no opinion on it."""
        ...


class BinaryJudge(Protocol):
    """Says whether a completion meets all of what is asked for."""

    def check(self, *, prompts: list[str], completions: list[str], **metadata: Any) -> Sequence[bool | None]:
        """True or False; None: no opinion."""
        ...


Judge = PairwiseJudge | RankingJudge | BinaryJudge

KINDS = ("rank", "compare", "check")
"""The methods that make a judge. One that has several is asked by the first of these."""

JUDGES: Registry[Callable[..., Any]] = Registry(
    "judge",
    {
        "llm": "trlx_like.rewards.llm_judge:LLMJudge",
        "reward_model": "trlx_like.rewards.judges:RewardModelJudge",
    },
)
register_judge = JUDGES.register


class RewardJudge:
    """The judge that goes by a reward function: the higher reward is better, equal rewards are a tie.

    reward_fn: as of `train`. Where it abstains (None) so does the judge. A reward for each token counts as its sum.
    """

    def __init__(self, reward_fn: Callable[..., Any]) -> None:
        self.reward_fn = reward_fn

    def rank(
        self, *, prompts: Sequence[str], completions: Sequence[Sequence[str]], tokenizer: Any = None, **metadata: Any
    ) -> list[list[float | None]]:
        """Rewards times -1."""
        places = [place for place, group in enumerate(completions) for _ in group]
        outputs = [output for group in completions for output in group]
        asked = [prompts[place] for place in places]
        texts = {"prompts": asked, "outputs": outputs, "samples": [p + o for p, o in zip(asked, outputs, strict=True)]}
        rows = [{name: column[place] for name, column in metadata.items()} for place in places]
        rewards = iter(call_reward(self.reward_fn, texts, rows, tokenizer))
        return [[_negative(next(rewards)) for _ in group] for group in completions]


class RewardModelJudge(RewardJudge):
    """The judge that goes by a reward model. model: a folder or hub name; options: of `RewardModel`."""

    def __init__(self, model: Any, **options: Any) -> None:
        from trlx_like.rewards.models import RewardModel

        super().__init__(RewardModel(model, **{"option": "judge.model", **options}))


def make_judge(spec: Any, option: str = "judge") -> Any:
    """The judge that `spec` stands for.

    spec: a judge; a reward function; the registered name of a judge, or a mapping of "name" and its options;
    `module:name` or `file.py:name` of a judge, of a class of judges, or of a reward function. option: what errors call
    it. ConfigError or RegistryError for anything else.
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
        return spec
    if callable(spec) and not isinstance(spec, type):
        return RewardJudge(spec)
    raise ConfigError(
        f"{option} must be an object with a method {', '.join(KINDS[:-1])} or {KINDS[-1]}, a reward function, or a "
        f"name for one, not {spec!r}."
    )


def check_judge(spec: Any, option: str = "judge") -> str:
    """The name of what `make_judge` would make, found without making it. Raises as that does."""
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


def kind_of(judge: Any) -> str | None:
    """The method by which an object judges; None for what is no judge."""
    if isinstance(judge, type):
        return None
    return next((kind for kind in KINDS if callable(getattr(judge, kind, None))), None)


def judged(
    judge: Any,
    prompts: Sequence[str],
    groups: Sequence[Sequence[str]],
    metadata: Sequence[Mapping[str, Any]] | None = None,
    tokenizer: Any = None,
) -> list[list[float | None]]:
    """How good each of a group's completions is, the groups being answers to the prompts: the larger, the better.

    From a judge that ranks or compares: the share of the others in its group that a completion beats, a tie or an
    abstention counting half. From one that checks: 1 or 0. None: the judge has no opinion on it. metadata: of each
    prompt. RewardError that names the judge for answers of another form.
    """
    given = [{} for _ in prompts] if metadata is None else list(metadata)
    kind = kind_of(judge)
    if kind == "rank":
        ranks = _ask(judge, kind, prompts, {"completions": [list(group) for group in groups]}, given, tokenizer)
        return [
            _shares([None if place is None else -place for place in _places(judge, row, len(group))])
            for row, group in zip(ranks, groups, strict=True)
        ]
    rows = [place for place, group in enumerate(groups) for _ in group]
    if kind == "check":
        flat = {"completions": [text for group in groups for text in group]}
        checks = iter(_ask(judge, kind, [prompts[r] for r in rows], flat, [given[r] for r in rows], tokenizer))
        return [[_checked(judge, next(checks)) for _ in group] for group in groups]
    return _compared(judge, prompts, groups, given, tokenizer)


class GroupReward:
    """A reward function: what a judge thinks of each completion within its group, as `judged` says it.

    group_size: completions of a group. They are to one prompt, and follow each other in what the function is called
    with.
    """

    def __init__(self, judge: Any, group_size: int) -> None:
        self.judge = judge
        self.group_size = group_size

    def __call__(
        self, *, samples: Sequence[str], prompts: Sequence[str], outputs: Sequence[str], tokenizer: Any, **keys: Any
    ) -> list[float | None]:
        starts = range(0, len(outputs), self.group_size)
        groups = [outputs[start : start + self.group_size] for start in starts]
        rows = [{name: column[start] for name, column in keys.items()} for start in starts]
        scores = judged(self.judge, [prompts[start] for start in starts], groups, rows, tokenizer)
        return [score for group in scores for score in group]


class Wins:
    """A reward function: 1 for an output that is better than a reference completion, 0 for one that is worse, else .5.

    judge: as `judged` takes it. key: that of the prompts under which the reference completion is. RewardError for a
    prompt without one.
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
        rows = [{name: column[row] for name, column in metadata.items()} for row in range(len(outputs))]
        groups = [list(pair) for pair in zip(outputs, references, strict=True)]
        return [_win(*scores) for scores in judged(self.judge, prompts, groups, rows, tokenizer)]


class WinRate:
    """A metric function: `win_rate`, how often an output is better than a reference completion, a tie counting half.

    judge: as of `make_judge`. key: that of the evaluation prompts under which the reference completion is. also:
    another metric function, whose metrics are added. RewardError for a prompt without a reference completion.
    """

    def __init__(self, judge: Any, *, key: str = "reference", also: Callable[..., Any] | None = None) -> None:
        self.judge = make_judge(judge)
        self.key = key
        self.also = also
        self.scored = {"win_rate": Wins(self.judge, key)}
        """Metrics that reward functions give: in an evaluation these go through the reward runner."""

    def __call__(
        self, *, samples: list[str], prompts: list[str], outputs: list[str], tokenizer: Any = None, **metadata: Any
    ) -> dict[str, list[float]]:
        rows = [{name: column[row] for name, column in metadata.items()} for row in range(len(outputs))]
        texts = {"samples": samples, "prompts": prompts, "outputs": outputs}
        more = {} if self.also is None else call_metric(self.also, texts, rows, tokenizer)
        wins = self.scored["win_rate"](prompts=prompts, outputs=outputs, tokenizer=tokenizer, **metadata)
        return {**more, "win_rate": wins}


def _win(own: float | None, other: float | None) -> float:
    if own is None or other is None or own == other:
        return 0.5
    return float(own > other)


def _compared(
    judge: Any, prompts: Sequence[str], groups: Sequence[Sequence[str]], metadata: list[Any], tokenizer: Any
) -> list[list[float | None]]:
    """Each with each of its group, once."""
    matches = [(row, a, b) for row, group in enumerate(groups) for a, b in combinations(range(len(group)), 2)]
    pairs = [(groups[row][a], groups[row][b]) for row, a, b in matches]
    asked = [prompts[row] for row, _, _ in matches]
    answers = _ask(judge, "compare", asked, {"pairs": pairs}, [metadata[row] for row, _, _ in matches], tokenizer)
    points = [[0.0] * len(group) for group in groups]
    for (row, a, b), answer in zip(matches, answers, strict=True):
        if answer is not None and (not isinstance(answer, SupportsIndex) or int(answer) not in (0, 1)):
            raise RewardError(f"{name_of(judge)}.compare returned {answer!r} for a pair; it must be 0, 1 or None.")
        share = 0.5 if answer is None else 1.0 - int(answer)
        points[row][a] += share
        points[row][b] += 1 - share
    return [[own / max(len(group) - 1, 1) for own in group] for group in points]


def _shares(values: list[float | None]) -> list[float | None]:
    """The share of the others that each beats, a tie counting half. None is left out of it."""
    known = [value for value in values if value is not None]

    def share(own: float) -> float:
        beaten = sum((own > other) + 0.5 * (own == other) for other in known) - 0.5  # it ties with itself
        return beaten / max(len(known) - 1, 1)

    return [None if value is None else share(value) for value in values]


def _ask(
    judge: Any, kind: str, prompts: Sequence[str], what: dict[str, Any], metadata: Sequence[Any], tokenizer: Any
) -> list[Any]:
    if not prompts:
        return []
    method, name = getattr(judge, kind), f"{name_of(judge)}.{kind}"
    own = {"prompts": list(prompts), **what, "tokenizer": tokenizer}
    given = accepted(method, {**own, **columns(metadata)}, tuple(own))
    try:
        answers = list(method(**given))
    except RewardError:
        raise
    except Exception as error:
        raise RewardError(f"{name} raised {type(error).__name__}: {error}\n  first prompt: {prompts[0]!r}") from error
    if len(answers) != len(prompts):
        raise RewardError(f"{name} returned {len(answers)} answers for {len(prompts)} questions.")
    return answers


def _places(judge: Any, row: Any, count: int) -> list[float | None]:
    try:
        places = [None if place is None else float(place) for place in row]
    except (TypeError, ValueError) as error:
        raise RewardError(f"{name_of(judge)}.rank returned {row!r}, which is no list of places: {error}") from error
    if len(places) != count or any(place is not None and math.isnan(place) for place in places):
        raise RewardError(f"{name_of(judge)}.rank returned {row!r} for {count} completions; give each a place or None.")
    return places


def _checked(judge: Any, answer: Any) -> float | None:
    if answer is None:
        return None
    if answer not in (True, False):
        raise RewardError(f"{name_of(judge)}.check returned {answer!r}; it must be True, False or None.")
    return float(answer)


def _negative(reward: Any) -> float | None:
    if reward is None:
        return None
    return -float(sum(reward) if isinstance(reward, list) else reward)


def _constructed(made: Callable[..., Any], options: dict[str, Any], option: str) -> Any:
    try:
        return made(**options)
    except TypeError as error:
        raise ConfigError(f"{option}: {name_of(made)} cannot be made of {options or 'no options'}: {error}") from error
