"""A language model as a judge, asked over HTTP at any server that implements OpenAI's chat completions.

    data:
      judge: {name: llm, url: "http://localhost:8000/v1", model: my-judge, cache: judge.jsonl}

Every pair is judged twice, the second time in the other order, since models prefer the answer that they see first (or
last): Zheng et al. 2023, arXiv:2306.05685, sec. 3.3. A verdict counts only if it does not change with the order.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trlx_like.errors import ConfigError, RewardError
from trlx_like.rewards.awaiting import run_async
from trlx_like.rewards.transport import Session, Transport, check_url

logger = logging.getLogger(__name__)

TEMPLATE = """Which of two answers to a prompt is better?

Prompt:
{prompt}

Answer A:
{a}

Answer B:
{b}

Reply with one letter and nothing else: A or B."""

_VERDICT = re.compile(r"[\W_]*([AB])[\W_]*")


class LLMJudge:
    """Judge pairs of completions by asking a language model.

    An answer that is neither A nor B is an abstention. `counts` holds how many requests were "asked" (answered),
    "cached", "retried" and "unparsed" (neither A nor B), and how many pairs were "order_dependent" (the verdict changed
    with the order). Redirects are not followed, so the key reaches no other server, and it is cut out of what a server
    says. No answer is read beyond 1 MiB.

    Args:
        url: The server's address up to and including `/v1`.
        model: The name of the model on the server.
        template: The question, with the fields {prompt}, {a} and {b}.
        api_key_env: The environment variable that holds the key, if the server needs one. It is sent as a bearer token;
            a value with its own scheme, such as `Basic dXNlcjpwYXNz`, is sent as it is.
        swap: Ask about each pair in both orders.
        timeout: Seconds in which a request has to be answered completely.
        retries: Further attempts after a failure that may be temporary.
        backoff: Seconds before the first retry, twice as many before each further one, and up to half as much again at
            random. A server may ask for a longer wait, of which at most 60 seconds count.
        workers: Requests at a time.
        cache: A file of JSON lines that keeps answers between runs; None: keep them in memory only.
        body: Further keys of the request, such as temperature (0 by default).

    Raises:
        ConfigError: An option cannot be used.
        RewardError: The server refuses a request, answers with anything but a chat completion or with more than 1 MiB,
            or still fails after the last attempt.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        template: str = TEMPLATE,
        api_key_env: str = "OPENAI_API_KEY",
        swap: bool = True,
        timeout: float = 60.0,
        retries: int = 4,
        backoff: float = 1.0,
        workers: int = 8,
        cache: str | Path | None = None,
        body: dict[str, Any] | None = None,
    ) -> None:
        check_url("judge.url", url)
        self.transport = Transport(
            "judge",
            RewardError,
            timeout=timeout,
            retries=retries,
            backoff=backoff,
            workers=workers,
            api_key_env=api_key_env,
        )
        missing = [field for field in ("{prompt}", "{a}", "{b}") if field not in template]
        if missing:
            raise ConfigError(f"judge.template lacks {', '.join(missing)}.")
        self.url, self.model, self.template = url.rstrip("/") + "/chat/completions", model, template
        self.swap = swap
        self.body = {"temperature": 0, **(body or {})}
        self.counts = self.transport.counts
        self._file = None if cache is None else Path(cache)
        self._answers: dict[str, str] = {} if self._file is None else _read(self._file)

    def compare(self, *, prompts: Sequence[str], pairs: Sequence[tuple[str, str]], **_: Any) -> list[int | None]:
        """Compare the completions of each pair.

        Returns:
            For each pair the place of the better completion, 0 or 1; None if the model abstains or contradicts itself.
        """
        orders = [(0, 1), (1, 0)] if self.swap else [(0, 1)]
        questions = [
            self._question(prompt, pair[first], pair[second])
            for prompt, pair in zip(prompts, pairs, strict=True)
            for first, second in orders
        ]
        answers = self._ask_all(questions)
        verdicts = [_verdict(answers[question]) for question in questions]
        self._count_unparsed([answers[q] for q, verdict in zip(questions, verdicts, strict=True) if verdict is None])
        return [self._settled(verdicts[i : i + len(orders)]) for i in range(0, len(verdicts), len(orders))]

    def _question(self, prompt: str, a: str, b: str) -> str:
        """Return the body of a request, which is also its key in the cache."""
        fields = {"{prompt}": prompt, "{a}": a, "{b}": b}
        # In one pass, since a text may itself contain the name of a field.
        text = re.sub(r"\{prompt\}|\{a\}|\{b\}", lambda field: fields[field[0]], self.template)
        return json.dumps({"model": self.model, "messages": [{"role": "user", "content": text}], **self.body})

    def _settled(self, verdicts: list[str | None]) -> int | None:
        """Combine the verdicts on a pair, in order and swapped."""
        if None in verdicts:
            return None
        choices = {int(verdict == "AB"[1 - swapped]) for swapped, verdict in enumerate(verdicts)}
        if len(choices) > 1:
            self.counts["order_dependent"] += 1
            return None
        return choices.pop()

    def _count_unparsed(self, answers: list[str]) -> None:
        if answers:
            self.counts["unparsed"] += len(answers)
            logger.warning("%d answers of the judge are neither A nor B, as is %.80r", len(answers), answers[0])

    def _ask_all(self, questions: Sequence[str]) -> dict[str, str]:
        """Return the answers to all questions, those from the cache included."""
        new = [question for question in dict.fromkeys(questions) if question not in self._answers]
        self.counts["cached"] += len(questions) - len(new)
        if new:
            run_async(lambda: self._ask_new(new))
        return self._answers

    async def _ask_new(self, questions: Sequence[str]) -> None:
        async with self.transport.session(self.url) as session:
            # The first failure ends all: the other questions would fail one after the other.
            await asyncio.gather(*(self._ask(question, session) for question in questions))

    async def _ask(self, question: str, session: Session) -> None:
        self._keep(question, await session.post(self.url, question))

    def _keep(self, question: str, content: bytes) -> None:
        """Take the answer out of a chat completion, and add it to the cache."""
        try:
            answer = str(json.loads(content)["choices"][0]["message"]["content"] or "")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise RewardError(f"judge.url ({self.url}) answered with no chat completion: {content[:200]!r}") from error
        self.counts["asked"] += 1
        self._answers[question] = answer
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"question": question, "answer": answer}) + "\n")


def _verdict(answer: str) -> str | None:
    """Return A or B if the last line says nothing else, or None."""
    lines = answer.strip().splitlines() or [""]
    match = _VERDICT.fullmatch(lines[-1])
    return None if match is None else match[1]


def _read(file: Path) -> dict[str, str]:
    """Read the cache, leaving out a line that a killed run wrote only in part."""
    answers = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            row = json.loads(line)
            answers[row["question"]] = row["answer"]
        except (ValueError, LookupError, TypeError, RecursionError):
            logger.warning("%s: left out a line that is no answer of a judge: %.80s", file, line)
    return answers
