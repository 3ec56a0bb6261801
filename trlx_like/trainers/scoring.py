"""Call the user's reward and metric functions on samples. A failure on one process is raised on all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trlx_like.errors import RewardError
from trlx_like.rewards import call_metric
from trlx_like.rewards.alignment import TOKEN_COLUMNS, offsets
from trlx_like.rewards.arguments import parameters
from trlx_like.rewards.outcome import Reward, whole
from trlx_like.rewards.runner import FAULTS_FILE, RewardRunner, Scores
from trlx_like.rewards.weighted import parts_of
from trlx_like.trainers.context import Row, Run


class Scoring:
    """Run reward and metric functions. Every process must call the methods equally often.

    Samples are given as rows: dictionaries with the arguments of the function for one sample, such as "prompts" and
    "outputs". "metadata" holds the prompt's own keys, and "length" the number of response tokens.

    Args:
        run: The run. The section `reward` of its configuration says how functions are called.
        function: The reward function, if there is one. It is checked at once, before a model is loaded.
    """

    def __init__(self, run: Run, function: Callable[..., Any] | None = None) -> None:
        self.run = run
        self.tokenizer: Any = None  # given to functions that ask for it
        self._runners: dict[int, RewardRunner] = {}  # by the id of the function, which they hold
        if function is not None:
            self.runner(function)

    def runner(self, function: Callable[..., Any]) -> RewardRunner:
        """Return the runner of a function, the same one at each call.

        Raises:
            ConfigError: If the function cannot be run with the options in the section `reward`.
        """
        if id(function) not in self._runners:
            options, directory = self.run.config.reward, self.run.folder.directory
            rank = self.run.world.rank
            self._runners[id(function)] = RewardRunner(function, options, directory=directory, rank=rank)
        return self._runners[id(function)]

    def submit(self, function: Callable[..., Any], rows: Sequence[Row]) -> Callable[[], Scores]:
        """Start to score the rows of this process, without waiting for the scores.

        With `train.reward_on_main_process` the main process scores the rows of all processes.

        Args:
            function: The reward function.
            rows: The samples of this process.

        Returns:
            A function that waits for the scores. It raises RewardError on every process, if scoring failed on one.
        """
        world, on_main = self.run.world, self.run.config.train.reward_on_main_process
        seen = world.gather(list(rows)) if on_main else list(rows)
        seen = seen if world.main or not on_main else []
        lengths = [row["length"] for row in seen] if seen and "length" in seen[0] else None
        step = self.run.progress.step
        ids = [row["output_ids"] for row in seen] if seen and "output_ids" in seen[0] else None
        columns = argument_columns(function, seen, self.tokenizer)
        runner = self.runner(function)
        submitted = runner.submit(*columns, lengths=lengths, ids=ids, tokenizer=self.tokenizer, step=step)

        def result() -> Scores:
            scores = world.together(lambda: runner.result(submitted), RewardError)
            if not on_main:
                return scores
            scores = world.broadcast(scores)
            before = sum(world.gather([len(rows)])[: world.rank])
            own = slice(before, before + len(rows))
            components = {name: column[own] for name, column in scores.components.items()}
            return Scores(scores.rewards[own], components, scores.faults if world.main else 0)

        return result

    def score(self, function: Callable[..., Any], rows: Sequence[Row]) -> Scores:
        """Score the rows of this process, and wait for the scores."""
        return self.submit(function, rows)()

    def measure(self, function: Callable[..., Any], rows: Sequence[Row]) -> Mapping[str, Sequence[Reward]]:
        """Call a metric function on the rows of this process.

        A metric that is computed by a reward function or judge (`WinRate.scored`) runs like a reward function, and
        may return None for a sample.

        Args:
            function: The metric function.
            rows: The samples of this process.

        Returns:
            For each metric by name, one number per row.
        """
        scored: Mapping[str, Callable[..., Any]] = getattr(function, "scored", {})
        plain = getattr(function, "also", None) if scored else function

        def call() -> dict[str, list[float]]:
            if plain is None or not rows:
                return {}
            metrics = call_metric(plain, *argument_columns(plain, rows, self.tokenizer), self.tokenizer)
            return {name: values * (len(rows) if len(values) == 1 else 1) for name, values in metrics.items()}

        metrics = self.run.world.together(call, RewardError)
        return {**metrics, **{name: self.score(own, rows).rewards for name, own in scored.items()}}

    def rate(
        self,
        reward_fn: Callable[..., Any] | None,
        metric_fn: Callable[..., Any] | None,
        seen: Sequence[Row],
        shown: Sequence[Row],
    ) -> None:
        """Score the samples of an evaluation, and add the results to its table in place.

        Args:
            reward_fn: The reward function; None for no rewards.
            metric_fn: The metric function; None for no metrics.
            seen: The arguments of the functions for each sample.
            shown: The table: a row per sample, which gets the columns "reward", "reward/<name>" and "metrics/<name>".

        Raises:
            RewardError: If scoring fails, or a larger fraction of samples than `reward.max_abstained` has no reward.
        """
        if reward_fn is not None:
            scores = self.score(reward_fn, seen)
            self.check(*self.run.world.sum([len(scores.rewards), scores.rewards.count(None), scores.faults]))
            for place, row in enumerate(shown):
                row |= reward_columns(scores.rewards, scores.components, place)
        if metric_fn is not None:
            for name, values in self.measure(metric_fn, seen).items():
                for row, value in zip(shown, values, strict=True):
                    row[f"metrics/{name}"] = value

    def check(self, samples: float, abstained: float, faults: float) -> None:
        """Raise RewardError if the fraction of samples without a reward is above `reward.max_abstained`."""
        limit = self.run.config.reward.max_abstained
        if abstained > limit * samples:
            share = f"{abstained:g} of {samples:g} samples have no reward"
            raise RewardError(f"{share}{after_faults(faults)}; reward.max_abstained is {limit:g}.")

    def close(self) -> None:
        """Stop the reward workers of this process, even if they are busy."""
        for runner in self._runners.values():
            runner.close()


def argument_columns(
    function: Callable[..., Any], rows: Sequence[Mapping[str, Any]], tokenizer: Any
) -> tuple[Mapping[str, list[Any]], list[dict[str, Any]]]:
    """Convert rows to the columns that a function may see, by name, and the list of the prompts' metadata."""
    wanted = set().union(*(parameters(part)[0] for part in parts_of(function).values()))
    hidden = {"metadata", "length", *TOKEN_COLUMNS} - wanted
    found = {name: [row[name] for row in rows] for name in (rows[0] if rows else ()) if name not in hidden}
    if "completion_ids" in wanted and rows and "output_ids" in rows[0]:  # TRL's name
        found["completion_ids"] = [row["output_ids"] for row in rows]
    if "output_offsets" in wanted and rows and "output_ids" in rows[0]:
        found["output_offsets"] = [offsets(row["output_ids"], row["outputs"], tokenizer) for row in rows]
    return found, [row["metadata"] for row in rows]


def after_faults(faults: float) -> str:
    """Return the end of an error message that points to the recorded failures, or "" without any."""
    return f", after {faults:g} faults ({FAULTS_FILE})" if faults else ""


def reward_columns(
    rewards: Sequence[Reward], components: Mapping[str, Sequence[Reward]], place: int
) -> dict[str, float | None]:
    """Return the table columns "reward" and "reward/<name>" of one sample.

    Args:
        rewards: The reward of each sample.
        components: The rewards of each of several functions, by name.
        place: Index of the sample.
    """
    columns = {"reward": rewards, **{f"reward/{name}": column for name, column in components.items()}}
    return {name: whole(column[place]) for name, column in columns.items()}
