"""A language model as a judge, asked over HTTP at any server that implements OpenAI's chat completions.

    data:
      judge: {name: llm, url: "http://localhost:8000/v1", model: my-judge, cache: judge.jsonl}

Every pair is judged twice, the second time in the other order, since models prefer the answer that they see first (or
last): Zheng et al. 2023, arXiv:2306.05685, sec. 3.3. A verdict counts only if it does not change with the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trlx_like.errors import ConfigError
from trlx_like.reading import packaged_text
from trlx_like.rewards.asked import AskedModel, filled

TEMPLATE = packaged_text("templates/judge.txt").rstrip()


class LLMJudge(AskedModel):
    """Judge pairs of completions by asking a language model.

    An answer that is neither A nor B is an abstention. `counts` holds also how many pairs were "order_dependent" (the
    verdict changed with the order).

    Args:
        url: The server's address up to and including `/v1`.
        model: The name of the model on the server.
        template: The question, with the fields {prompt}, {a} and {b}.
        swap: Ask about each pair in both orders.
        **options: Further options of `AskedModel`, such as timeout, retries, workers, cache and api_key_env.

    Raises:
        ConfigError: An option cannot be used.
        RewardError: As `AskedModel`.
    """

    def __init__(self, url: str, model: str, *, template: str = TEMPLATE, swap: bool = True, **options: Any) -> None:
        super().__init__("judge", url, model, **options)
        if missing := [field for field in ("{prompt}", "{a}", "{b}") if field not in template]:
            raise ConfigError(f"judge.template lacks {', '.join(missing)}.")
        self.template, self.swap = template, swap

    def compare(self, *, prompts: Sequence[str], pairs: Sequence[tuple[str, str]], **_: Any) -> list[int | None]:
        """Compare the completions of each pair.

        Returns:
            For each pair the place of the better completion, 0 or 1; None if the model abstains or contradicts itself.
        """
        orders = [(0, 1), (1, 0)] if self.swap else [(0, 1)]
        questions = [
            filled(self.template, {"prompt": prompt, "a": pair[first], "b": pair[second]})
            for prompt, pair in zip(prompts, pairs, strict=True)
            for first, second in orders
        ]
        verdicts = self.choices(questions, ("A", "B"))
        return [self._settled(verdicts[i : i + len(orders)]) for i in range(0, len(verdicts), len(orders))]

    def _settled(self, verdicts: list[int | None]) -> int | None:
        """Combine the verdicts on a pair, in order and swapped."""
        places = {None if verdict is None else verdict ^ swapped for swapped, verdict in enumerate(verdicts)}
        if None in places:
            return None
        if len(places) > 1:
            self.counts["order_dependent"] += 1
            return None
        return places.pop()
