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
import os
import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

from trlx_like.errors import ConfigError, RewardError
from trlx_like.redact import HIDDEN
from trlx_like.rewards.awaiting import run_async

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
_TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504}
"""HTTP statuses that another attempt may not meet."""
MAX_BYTES = 2**20
"""Size above which an answer is refused."""
MAX_WAIT = 60.0
"""Seconds that a retry waits at most before the random part, whatever the server asks for."""
_pause = asyncio.sleep
_JITTER = random.Random()  # not the generator whose state belongs to the run


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
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"judge.url ({url!r}) must begin with http:// or https://.")
        try:
            named = httpx2.URL(url).host
        except httpx2.InvalidURL as error:
            raise ConfigError(f"judge.url ({url!r}) is no address: {error}") from error
        if not named:
            raise ConfigError(f"judge.url ({url!r}) names no server.")
        for name, value, least in (("retries", retries, 0), ("backoff", backoff, 0), ("workers", workers, 1)):
            if value < least:
                raise ConfigError(f"judge.{name} ({value}) must be at least {least}.")
        if timeout <= 0:
            raise ConfigError(f"judge.timeout ({timeout}) must be above 0 seconds.")
        missing = [field for field in ("{prompt}", "{a}", "{b}") if field not in template]
        if missing:
            raise ConfigError(f"judge.template lacks {', '.join(missing)}.")
        self.url, self.model, self.template = url.rstrip("/") + "/chat/completions", model, template
        self.api_key_env, self.swap, self.timeout = api_key_env, swap, timeout
        self.retries, self.backoff, self.workers = retries, backoff, workers
        self.body = {"temperature": 0, **(body or {})}
        self.counts: Counter[str] = Counter()
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
        # A compressed answer could be small on its way and have gigabytes here.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key := self._key():
            headers["Authorization"] = key if " " in key else f"Bearer {key}"
        slots = asyncio.Semaphore(self.workers)
        tls = self.url.startswith("https")  # reading the certificates takes a tenth of a second
        async with httpx2.AsyncClient(headers=headers, timeout=None, follow_redirects=False, verify=tls) as client:
            # The first failure ends all: the other questions would fail one after the other.
            await asyncio.gather(*(self._ask(question, client, slots) for question in questions))

    def _key(self) -> str:
        key = os.environ.get(self.api_key_env, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"judge.api_key_env ({self.api_key_env}): its value has characters that no key has.")
        return key

    async def _ask(self, question: str, client: httpx2.AsyncClient, slots: asyncio.Semaphore) -> None:
        """Ask one question, again after temporary failures, and keep the answer."""
        async with slots:
            for attempt in range(self.retries + 1):
                wait = self.backoff * 2**attempt
                try:
                    async with asyncio.timeout(self.timeout):
                        response, content = await self._request(question, client)
                except TimeoutError:
                    reason = f"it had not answered within judge.timeout ({self.timeout:g} s)"
                except httpx2.TransportError as error:
                    reason = f"{type(error).__name__}: {error}"
                else:
                    if response.is_success:
                        return self._keep(question, content)
                    place = f" redirects to {response.headers['Location']}" if response.has_redirect_location else ""
                    reason = f"status {response.status_code}{place}: {content[:200].decode(errors='replace')}"
                    reason = reason.replace(self._key() or HIDDEN, HIDDEN)  # of the redirect; the answer has none
                    if response.status_code not in _TRANSIENT:
                        raise RewardError(f"judge.url ({self.url}) refuses: {reason}")
                    wait = max(wait, _seconds(response.headers.get("Retry-After")))
                if attempt < self.retries:
                    self.counts["retried"] += 1
                    await _pause(min(wait, MAX_WAIT) * _JITTER.uniform(1, 1.5))
        raise RewardError(f"judge.url ({self.url}) failed {self.retries + 1} times; the last time {reason}")

    async def _request(self, question: str, client: httpx2.AsyncClient) -> tuple[httpx2.Response, bytes]:
        content = b""
        async with client.stream("POST", self.url, content=question) as response:
            async for part in response.aiter_raw():
                content += part
                if len(content) > MAX_BYTES:
                    raise RewardError(f"judge.url ({self.url}) answered with more than {MAX_BYTES} bytes.")
        return response, content.replace(self._key().encode() or HIDDEN.encode(), HIDDEN.encode())

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


def _seconds(header: str | None) -> float:
    """Return the seconds of a Retry-After header, or 0 if it is missing or a date."""
    return float(header) if header is not None and header.isdecimal() else 0.0
