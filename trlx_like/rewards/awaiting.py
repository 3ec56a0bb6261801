"""Await the results of async functions concurrently, each within its time limit."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from trlx_like.rewards.limits import Limit, TimeUp, alarm
from trlx_like.rewards.outcome import Call, Fault


def needs_await(returned: Any) -> bool:
    """Tell whether a value is awaitable, or a list with awaitable entries."""
    return inspect.isawaitable(returned) or (
        isinstance(returned, (list, tuple)) and any(map(inspect.isawaitable, returned))
    )


def awaited(pending: Sequence[tuple[Call, Any]]) -> list[Any]:
    """Await the results of several calls concurrently.

    Args:
        pending: Calls, each with what it returned.

    Returns:
        For each call the awaited value, or a `Fault`.
    """
    limits = [call.begin() for call, _ in pending]
    done: dict[int, Any] = {}

    def failed(place: int, error: BaseException, late: bool) -> Fault:
        call, limit = pending[place][0], limits[place]
        return call.late(limit, error) if late and limit is not None else call.raised(error)

    async def one(place: int, returned: Any) -> None:
        limit = limits[place]
        try:
            async with asyncio.timeout(None if limit is None else max(limit.seconds, 0)) as timer:
                done[place] = await _settled(returned)
        except (Exception, SystemExit) as error:
            done[place] = failed(place, error, timer.expired() and isinstance(error, TimeoutError))

    async def everything() -> None:
        await asyncio.gather(*(one(place, returned) for place, (_, returned) in enumerate(pending)))

    known = [limit for limit in limits if limit is not None]
    longest = max(known, key=lambda limit: limit.seconds) if len(known) == len(limits) else None
    try:
        # One second more than the loop's own timers, because those know which call was late.
        run_async(everything, longest and replace(longest, seconds=longest.seconds + 1.0))
    except (TimeUp, SystemExit) as error:  # by a function that blocks or ends the event loop of all calls
        for place in set(range(len(pending))) - set(done):
            done[place] = failed(place, error, isinstance(error, TimeUp))
    return [done[place] for place in range(len(pending))]


async def _settled(returned: Any) -> Any:
    """Await a value, or every awaitable entry of a list."""
    values = await returned if inspect.isawaitable(returned) else returned
    if not needs_await(values):
        return values
    pending = iter(await asyncio.gather(*filter(inspect.isawaitable, values), return_exceptions=True))
    return [next(pending) if inspect.isawaitable(value) else value for value in values]


def run_async(work: Callable[[], Coroutine[Any, Any, Any]], limit: Limit | None = None) -> Any:
    """Run a coroutine function to its end, also where an event loop is already running.

    Args:
        work: The coroutine function, without arguments.
        limit: Time after which `TimeUp` is raised in code that blocks the loop.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with alarm(limit, None):
            return asyncio.run(work())
    with ThreadPoolExecutor(1) as thread:  # the running loop, a notebook's, is busy with this call
        return thread.submit(lambda: asyncio.run(work())).result()
