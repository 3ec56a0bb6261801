"""A language model that answers questions, at any server that implements OpenAI's chat completions.

The judge `llm` and the reward `rubric` ask one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trlx_like.errors import ConfigError, RewardError, raised_as, writing
from trlx_like.reading import read_bytes, unusable
from trlx_like.rewards.awaiting import run_async
from trlx_like.rewards.transport import Post, Transport, check_url

logger = logging.getLogger(__name__)


class AskedModel:
    """Ask a language model questions that have two possible answers.

    `counts` holds how many requests were "asked" (answered), "cached", "retried" and "unparsed" (neither of the two
    answers). Redirects are not followed, so the key reaches no other server, and it is cut out of what a server says.
    No answer is read beyond 1 MiB.

    Args:
        option: What the model is for, as errors name it: `judge` or the option of a reward function.
        url: The server's address up to and including `/v1`.
        model: The name of the model on the server.
        api_key_env: The environment variable that holds the key, if the server needs one. It is sent as a bearer token;
            a value with its own scheme, such as `Basic dXNlcjpwYXNz`, is sent as it is.
        cache: A file of JSON lines that keeps answers between runs; None: keep them in memory only.
        body: Further keys of the request, such as temperature (0 by default).
        **limits: The limits of `Transport`, with its defaults: timeout, retries, backoff and workers.

    Raises:
        ConfigError: An option cannot be used.
        RewardError: The server refuses a request, answers with anything but a chat completion or with more than 1 MiB,
            or still fails after the last attempt.
    """

    def __init__(
        self,
        option: str,
        url: str,
        model: str,
        *,
        api_key_env: str = "OPENAI_API_KEY",
        cache: str | Path | None = None,
        body: dict[str, Any] | None = None,
        **limits: Any,
    ) -> None:
        check_url(f"{option}.url", url)
        self.transport = Transport(option, RewardError, api_key_env=api_key_env, **limits)
        self.url, self.model = url.rstrip("/") + "/chat/completions", model
        self.body = {"temperature": 0, **(body or {})}
        self.counts = self.transport.counts
        self._file = None if cache is None else Path(os.path.expanduser(cache))
        with raised_as(ConfigError, (OSError, UnicodeDecodeError), f"{option}.cache ({str(cache)!r}) cannot be used"):
            self._answers: dict[str, str] = {} if self._file is None else _read(self._file)

    def choices(self, texts: Sequence[str], words: tuple[str, str]) -> list[int | None]:
        """Ask questions, and return the place of each answer among two words.

        Args:
            texts: The questions, each of which asks for one of the words.
            words: The words, of which the last line of an answer may be one, in any case.

        Returns:
            For each question 0 or 1; None if the last line of the answer is neither.
        """
        questions = [  # the body of a request is also its key in the cache
            json.dumps({"model": self.model, "messages": [{"role": "user", "content": text}], **self.body})
            for text in texts
        ]
        answers = self._ask_all(questions)
        found = [_place(answers[question], words) for question in questions]
        unparsed = [answers[question] for question, place in zip(questions, found, strict=True) if place is None]
        if unparsed:
            self.counts["unparsed"] += len(unparsed)
            what = f"{len(unparsed)} answers of {self.transport.option} are neither {words[0]} nor {words[1]}"
            logger.warning(f"{what}, as is {unparsed[0]!r:.80}")
        return found

    def _ask_all(self, questions: Sequence[str]) -> dict[str, str]:
        """Return the answers to all questions, those from the cache included."""
        new = [question for question in dict.fromkeys(questions) if question not in self._answers]
        self.counts["cached"] += len(questions) - len(new)
        if new:
            run_async(lambda: self._ask_new(new))
        return self._answers

    async def _ask_new(self, questions: Sequence[str]) -> None:
        async with self.transport.session(self.url) as post:
            # The first failure ends all: the other questions would fail one after the other.
            await asyncio.gather(*(self._ask(question, post) for question in questions))

    async def _ask(self, question: str, post: Post) -> None:
        """Take the answer out of a chat completion, and add it to the cache."""
        content = await post(self.url, question)
        try:
            answer = str(json.loads(content)["choices"][0]["message"]["content"] or "")
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            place = f"{self.transport.option}.url ({self.url})"
            raise RewardError(f"{place} answered with no chat completion: {content[:200]!r}") from error
        self.counts["asked"] += 1
        self._answers[question] = answer
        if self._file is not None:
            with writing(self._file):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps({"question": question, "answer": answer}) + "\n")


def filled(template: str, fields: Mapping[str, str]) -> str:
    """Put texts in the place of {fields}, in one pass, since a text may itself contain the name of a field."""
    return re.sub(r"\{(\w+)\}", lambda field: fields.get(field[1], field[0]), template)


def _place(answer: str, words: tuple[str, str]) -> int | None:
    """Return which of two words the last line says, if it says nothing else."""
    lines = answer.strip().splitlines() or [""]
    said = re.sub(r"^[\W_]+|[\W_]+$", "", lines[-1]).lower()
    return next((place for place, word in enumerate(words) if word.lower() == said), None)


def _read(file: Path) -> dict[str, str]:
    """Read the cache, leaving out a line that a killed run wrote only in part."""
    if why := unusable(file.parent):
        raise OSError(why)
    answers = {}
    for line in read_bytes(file).decode().splitlines() if os.path.lexists(file) else ():
        try:
            row = json.loads(line)
            answers[row["question"]] = row["answer"]
        except (ValueError, LookupError, TypeError, RecursionError):
            logger.warning("%s: left out a line that is no answer of a judge: %.80s", file, line)
    return answers
