"""A language model as a judge, asked over HTTP: any server that speaks OpenAI's chat completions.

    data:
      judge: {name: llm, url: "http://localhost:8000/v1", model: my-judge, cache: judge.jsonl}

Every pair is asked about twice, the second time in the other order: models prefer the answer that they see first (or
last), Zheng et al. 2023, arXiv:2306.05685, sec. 3.3. Only an answer that does not change with the order counts.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trlx_like.errors import ConfigError, RewardError

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
_PASSING = {408, 409, 425, 429, 500, 502, 503, 504}
"""Statuses of HTTP that another attempt may not meet."""


class LLMJudge:
    """A pairwise judge that asks a language model.

    url: of the server up to and with `/v1`. model: its name there. template: of the question, with {prompt}, {a} and
    {b}. api_key_env: the environment variable that holds the key, if the server wants one. swap: ask in both orders.
    timeout: seconds that the server may be silent. retries, backoff: further attempts after a failure that may pass,
    and seconds before the first of them, twice as many before each further one. workers: requests at a time. cache: a
    file of JSON lines in which answers are kept over runs; None: in memory only. body: further keys of the request,
    such as temperature (0 unless given).

    An answer that is neither A nor B is an abstention. `counts` says how many there were: "asked" (requests that were
    answered), "cached", "retried", "unparsed" (neither A nor B), "swayed" (pairs of which the order decided).
    RewardError when the server still fails after the last attempt.
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
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"judge.url ({url!r}) must begin with http:// or https://.")
        missing = [field for field in ("{prompt}", "{a}", "{b}") if field not in template]
        if missing:
            raise ConfigError(f"judge.template lacks {', '.join(missing)}.")
        self.url, self.model, self.template = url.rstrip("/") + "/chat/completions", model, template
        self.api_key_env, self.swap, self.timeout = api_key_env, swap, timeout
        self.retries, self.backoff, self.workers = retries, backoff, workers
        self.body = {"temperature": 0, **(body or {})}
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._file = None if cache is None else Path(cache)
        self._answers: dict[str, str] = {} if self._file is None else _read(self._file)

    def __getstate__(self) -> dict[str, Any]:
        """For a process of `reward.workers`, which needs a lock of its own."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def compare(self, *, prompts: Sequence[str], pairs: Sequence[tuple[str, str]], **_: Any) -> list[int | None]:
        """0 or 1, the better one of each pair; None where the model abstains or goes by the order."""
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
        """The body of a request, which is also its key in the cache."""
        fields = {"{prompt}": prompt, "{a}": a, "{b}": b}
        # In one go: a text may itself contain the name of a field.
        text = re.sub(r"\{prompt\}|\{a\}|\{b\}", lambda field: fields[field[0]], self.template)
        return json.dumps({"model": self.model, "messages": [{"role": "user", "content": text}], **self.body})

    def _settled(self, verdicts: list[str | None]) -> int | None:
        """What the verdicts on a pair, in order and swapped, come to."""
        if None in verdicts:
            return None
        choices = {
            int(verdict == "B") if swapped == 0 else int(verdict == "A") for swapped, verdict in enumerate(verdicts)
        }
        if len(choices) > 1:
            self.counts["swayed"] += 1
            return None
        return choices.pop()

    def _count_unparsed(self, answers: list[str]) -> None:
        if answers:
            self.counts["unparsed"] += len(answers)
            logger.warning("%d answers of the judge are neither A nor B, as is %.80r", len(answers), answers[0])

    def _ask_all(self, questions: Sequence[str]) -> dict[str, str]:
        """Answers to all questions, those from the cache included."""
        new = [question for question in dict.fromkeys(questions) if question not in self._answers]
        self.counts["cached"] += len(questions) - len(new)
        with ThreadPoolExecutor(self.workers) as pool:
            asked = [pool.submit(self._ask, question) for question in new]
            try:
                for one in asked:
                    one.result()
            except RewardError:
                pool.shutdown(wait=False, cancel_futures=True)  # the others would fail one after the other
                raise
        return self._answers

    def _ask(self, question: str) -> None:
        for attempt in range(self.retries + 1):
            try:
                answer = self._request(question)
            except urllib.error.HTTPError as error:
                reason = f"status {error.code}: {error.read()[:200].decode(errors='replace')}"
                if error.code not in _PASSING:
                    raise RewardError(f"judge.url ({self.url}) refuses: {reason}") from error
                wait = _seconds(error.headers.get("Retry-After"))
            except (OSError, http.client.HTTPException) as error:  # no connection, or silence
                reason, wait = f"{type(error).__name__}: {error}", 0.0
            else:
                self._keep(question, answer)
                return
            if attempt < self.retries:
                with self._lock:
                    self.counts["retried"] += 1
                time.sleep(max(wait, self.backoff * 2**attempt))
        raise RewardError(f"judge.url ({self.url}) failed {self.retries + 1} times; the last time {reason}")

    def _request(self, question: str) -> str:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.api_key_env):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url, question.encode(), headers)
        with urllib.request.urlopen(request, timeout=self.timeout) as response:
            answer = response.read()
        try:
            return str(json.loads(answer)["choices"][0]["message"]["content"] or "")
        except (ValueError, LookupError, TypeError) as error:
            raise RewardError(f"judge.url ({self.url}) answered with no chat completion: {answer[:200]!r}") from error

    def _keep(self, question: str, answer: str) -> None:
        with self._lock:
            self.counts["asked"] += 1
            self._answers[question] = answer
            if self._file is not None:
                with self._file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps({"question": question, "answer": answer}) + "\n")


def _verdict(answer: str) -> str | None:
    """A or B, if that is all that the last line says."""
    lines = answer.strip().splitlines() or [""]
    match = _VERDICT.fullmatch(lines[-1])
    return None if match is None else match[1]


def _read(file: Path) -> dict[str, str]:
    """Answers that were kept. A line that a killed run left half-written is left out."""
    answers = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            row = json.loads(line)
            answers[row["question"]] = row["answer"]
        except (ValueError, LookupError, TypeError):
            logger.warning("%s: left out a line that is no answer of a judge: %.80s", file, line)
    return answers


def _seconds(header: str | None) -> float:
    """Of a Retry-After; 0 for a date or nothing."""
    return float(header) if header is not None and header.isdigit() else 0.0
