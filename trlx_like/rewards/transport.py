"""Requests over HTTP that are bounded in time and size, and tried again after failures that may be temporary.

The judge over HTTP and sampling servers use it. Redirects are not followed, so that a key reaches no other server.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import httpx2

from trlx_like.errors import ConfigError, TrlxError, raised_as
from trlx_like.redact import HIDDEN

_TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504}
"""HTTP statuses that another attempt may not meet."""
MAX_BYTES = 2**20
"""Size above which an answer is refused, unless said otherwise."""
MAX_WAIT = 60.0
"""Seconds that a retry waits at most before the random part, whatever the server asks for."""
_pause = asyncio.sleep
_JITTER = random.Random()  # not the generator whose state belongs to the run


def check_url(option: str, url: str) -> None:
    """Raise ConfigError for text that cannot be the address of a server.

    Args:
        option: The option that holds it, for the message.
        url: The text.
    """
    if not str(url).startswith(("http://", "https://")):
        raise ConfigError(f"{option} ({url!r}) must begin with http:// or https://.")
    with raised_as(ConfigError, httpx2.InvalidURL, f"{option} ({url!r}) is no address"):
        named = httpx2.URL(url).host
    if not named:
        raise ConfigError(f"{option} ({url!r}) names no server.")


Post = Callable[[str, str], Awaitable[bytes]]
"""A function of an address and of the content of a request."""


class Transport:
    """Send requests to servers and read their answers, within limits.

    `counts["retried"]` is the number of attempts after the first ones.

    Args:
        option: The option that the limits belong to, for messages: `judge` or `sampler.kwargs`.
        error: The class of error to raise if a server fails.
        timeout: Seconds in which a request has to be answered completely.
        retries: Further attempts after a failure that may be temporary.
        backoff: Seconds before the first retry, twice as many before each further one, and up to half as much again at
            random. A server may ask for a longer wait, of which at most 60 seconds count.
        workers: Requests at a time.
        api_key_env: The environment variable that holds a key, which is sent as a bearer token.
        max_bytes: Size above which an answer is refused.

    Raises:
        ConfigError: A limit is impossible.
    """

    def __init__(
        self,
        option: str,
        error: type[TrlxError],
        *,
        api_key_env: str,
        timeout: float = 60.0,
        retries: int = 4,
        backoff: float = 1.0,
        workers: int = 8,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        for name, value, least in (("retries", retries, 0), ("backoff", backoff, 0), ("workers", workers, 1)):
            if not value >= least:  # NaN is not
                raise ConfigError(f"{option}.{name} ({value}) must be at least {least}.")
        if not timeout > 0:
            raise ConfigError(f"{option}.timeout ({timeout}) must be above 0 seconds.")
        self.option, self.error, self.api_key_env = option, error, api_key_env
        self.timeout, self.retries, self.backoff = timeout, retries, backoff
        self.workers, self.max_bytes = workers, max_bytes
        self.counts: Counter[str] = Counter()

    @asynccontextmanager
    async def session(self, url: str) -> AsyncIterator[Post]:
        """Open connections for requests to servers of one kind, within a block.

        Args:
            url: An address of one of them, which says whether certificates are needed.

        Yields:
            A function that sends a request, again after temporary failures, and returns the answer.
        """
        # A compressed answer could be small on its way and have gigabytes here.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if key := self.key():
            headers["Authorization"] = key if " " in key else f"Bearer {key}"
        tls = url.startswith("https")  # reading the certificates takes a tenth of a second
        async with httpx2.AsyncClient(headers=headers, timeout=None, follow_redirects=False, verify=tls) as client:
            yield partial(self._post, client, asyncio.Semaphore(self.workers))

    def key(self) -> str:
        """Return the key; empty without one."""
        key = os.environ.get(self.api_key_env, "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(
                f"{self.option}.api_key_env ({self.api_key_env}): its value has characters that no key has."
            )
        return key

    async def _post(self, client: httpx2.AsyncClient, slots: asyncio.Semaphore, url: str, content: str) -> bytes:
        """Send a request, again after temporary failures, and return the answer.

        Args:
            url: The address.
            content: The body, as JSON.

        Raises:
            TrlxError: The transport's kind, if the server refuses, answers with too much, or fails in every attempt.
        """
        place = f"{self.option}.url ({url})"
        async with slots:
            for attempt in range(self.retries + 1):
                wait = self.backoff * 2**attempt
                try:
                    async with asyncio.timeout(self.timeout):
                        response, answer = await self._once(client, url, content)
                except TimeoutError:
                    reason = f"it had not answered within {self.option}.timeout ({self.timeout:g} s)"
                except httpx2.TransportError as error:
                    reason = f"{type(error).__name__}: {error}"
                else:
                    if response.is_success:
                        return answer
                    moved = f" redirects to {response.headers['Location']}" if response.has_redirect_location else ""
                    reason = f"status {response.status_code}{moved}: {answer[:200].decode(errors='replace')}"
                    reason = reason.replace(self.key() or HIDDEN, HIDDEN)  # of the redirect; the answer has none
                    if response.status_code not in _TRANSIENT:
                        raise self.error(f"{place} refuses: {reason}")
                    wait = max(wait, _seconds(response.headers.get("Retry-After")))
                if attempt < self.retries:
                    self.counts["retried"] += 1
                    await _pause(min(wait, MAX_WAIT) * _JITTER.uniform(1, 1.5))
        raise self.error(f"{place} failed {self.retries + 1} times; the last time {reason}")

    async def _once(self, client: httpx2.AsyncClient, url: str, content: str) -> tuple[httpx2.Response, bytes]:
        answer = b""
        async with client.stream("POST", url, content=content) as response:
            async for part in response.aiter_raw():
                answer += part
                if len(answer) > self.max_bytes:
                    raise self.error(f"{self.option}.url ({url}) answered with more than {self.max_bytes} bytes.")
        return response, answer.replace(self.key().encode() or HIDDEN.encode(), HIDDEN.encode())


def _seconds(header: str | None) -> float:
    """Return the seconds of a Retry-After header, or 0 if it is missing or a date."""
    return float(header) if header is not None and header.isdecimal() else 0.0
