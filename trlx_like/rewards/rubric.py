"""A rubric as a reward: a language model is asked yes-or-no questions about each output.

    data:
      reward_fn:
        name: rubric
        url: http://localhost:8000/v1
        model: my-judge
        questions:
          - {name: correct, ask: "Does the answer agree with {reference}?", weight: 0.8}
          - {name: polite, ask: "Is the answer polite?", weight: 0.2}

Each question is a reward function of its own, and the reward is their weighted sum: the explicit aggregation of
Gunjal et al. 2025, arXiv:2507.17746, sec. 3, without its division by the sum of the weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trlx_like.errors import ConfigError
from trlx_like.reading import packaged_text
from trlx_like.rewards.asked import AskedModel, filled
from trlx_like.rewards.weighted import WeightedRewards

TEMPLATE = packaged_text("templates/rubric.txt").rstrip()


class RubricQuestion:
    """Give 1 to an output if a language model answers a question about it with yes, and 0 if with no.

    An answer that is neither is an abstention (None).

    Args:
        label: The name of the question in columns and metrics.
        ask: The question. Keys of the prompts in braces, such as {reference}, are replaced by their values.
        model: The model to ask.
    """

    def __init__(self, label: str, ask: str, model: AskedModel) -> None:
        self.label, self.ask, self.model = label, ask, model
        self.required_keys = re.findall(r"\{(\w+)\}", ask)

    def __call__(self, *, prompts: Sequence[str], outputs: Sequence[str], **columns: Any) -> list[float | None]:
        texts = []
        for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            question = filled(self.ask, {key: str(columns[key][row]) for key in self.required_keys})
            texts.append(filled(TEMPLATE, {"prompt": prompt, "answer": output, "question": question}))
        return [None if said is None else float(said) for said in self.model.choices(texts, ("No", "Yes"))]


def rubric(spec: Mapping[str, Any], option: str = "reward_fn") -> WeightedRewards:
    """Make the reward of a rubric from its options.

    Args:
        spec: A mapping with `questions`, a list of mappings with `name`, `ask` and `weight` (1 by default), and the
            options of `AskedModel`.
        option: The name of `spec` in errors.

    Raises:
        ConfigError: There is no question, or an option is unknown, missing or impossible.
    """
    options = {key: value for key, value in spec.items() if key not in ("name", "questions")}
    questions = spec.get("questions")
    if not isinstance(questions, list) or not questions or not all(map(_is_question, questions)):
        raise ConfigError(
            f"{option}.questions ({questions!r:.200}) must be a list of mappings with name and ask, which are texts, "
            "and weight, a number."
        )
    try:
        model = AskedModel(option, **options)
    except TypeError as error:
        raise ConfigError(f"{option}: rubric cannot be made of {', '.join(options) or 'nothing'}: {error}.") from error
    return WeightedRewards(
        [RubricQuestion(row["name"], row["ask"], model) for row in questions],
        [row.get("weight", 1.0) for row in questions],
    )


def _is_question(row: Any) -> bool:
    if not isinstance(row, Mapping) or not {"name", "ask"} <= set(row) <= {"name", "ask", "weight"}:
        return False
    weight = row.get("weight", 1.0)
    texts = all(isinstance(row[key], str) and row[key] for key in ("name", "ask"))
    return texts and isinstance(weight, int | float) and not isinstance(weight, bool)
