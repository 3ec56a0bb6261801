"""Reward functions with a fault each, at the top level of a module that imports nothing heavy: workers find them here.

All are good for outputs without the word "bad".
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

_CALLS = count(1)


def length(outputs: Sequence[str]) -> list[float]:
    return [float(len(output)) for output in outputs]


def raises(outputs: Sequence[str]) -> list[float]:
    if "bad" in outputs:
        raise ValueError("no reward for bad")
    return length(outputs)


def wrong_length(outputs: Sequence[str]) -> list[float]:
    return length([output for output in outputs if output != "bad"])


def wrong_type(outputs: Sequence[str]) -> list[Any]:
    return ["0.5" if output == "bad" else len(output) for output in outputs]


def nan(outputs: Sequence[str]) -> list[float]:
    return [float("nan") if output == "bad" else len(output) for output in outputs]


def inf(outputs: Sequence[str]) -> list[float]:
    return [float("inf") if output == "bad" else len(output) for output in outputs]


def none(outputs: Sequence[str]) -> list[float] | None:
    return None if "bad" in outputs else length(outputs)


def hangs(outputs: Sequence[str]) -> list[float]:
    while "bad" in outputs:
        time.sleep(0.01)
    return length(outputs)


def hangs_for_good(outputs: Sequence[str]) -> list[float]:
    """Whatever is raised in it."""
    while "bad" in outputs:
        try:
            time.sleep(0.01)
        except BaseException:
            continue
    return length(outputs)


def exits(outputs: Sequence[str]) -> list[float]:
    if "bad" in outputs:
        print("leaving")
        os._exit(3)
    return length(outputs)


def hogs(outputs: Sequence[str]) -> list[float]:
    held: list[bytearray] = []
    while "bad" in outputs and len(held) < 100:
        held.append(bytearray(os.urandom(1) * 2**24))
        time.sleep(0.005)
    return length(outputs)


def prints(outputs: Sequence[str]) -> list[float]:
    if "bad" in outputs:
        print("\x80\x04printed\r\n" * 5000)
        os.write(1, b"\x00\x00\x00\x05written\n")
    return length(outputs)


def mutates(outputs: list[str], goals: list[dict[str, Any]]) -> list[float]:
    rewards = length(outputs)
    outputs.clear()
    for goal in goals:
        goal["seen"] = goal.pop("name")
    goals.reverse()
    return rewards


def counts(outputs: Sequence[str]) -> list[float]:
    """Another answer each time."""
    return [float(next(_CALLS)) for _ in outputs]


async def patient(outputs: Sequence[str], log: Sequence[str]) -> list[float]:
    await _noted(log[0], "patient")
    return length(outputs)


async def patient_too(outputs: Sequence[str], log: Sequence[str]) -> list[float]:
    await _noted(log[0], "patient too")
    return [-reward for reward in length(outputs)]


def one_by_one(outputs: Sequence[str]) -> list[Any]:
    """Something to await for each sample."""
    return [_of_one(output) for output in outputs]


async def stuck(outputs: Sequence[str]) -> list[float]:
    while "bad" in outputs:
        await asyncio.sleep(0.01)
    return length(outputs)


def leaves(outputs: Sequence[str]) -> list[Any]:
    async def one(output: str) -> float:
        if output == "bad":
            raise SystemExit(3)
        return float(len(output))

    return [one(output) for output in outputs]


async def blocks(outputs: Sequence[str]) -> list[float]:
    """Async by name: it keeps all others from running."""
    while "bad" in outputs:
        time.sleep(0.01)
    return length(outputs)


def pid(outputs: Sequence[str]) -> list[float]:
    return [float(os.getpid()) for _ in outputs]


def tokens(outputs: Sequence[str], tokenizer: Any) -> list[float]:
    return [float(len(tokenizer(output)["input_ids"])) for output in outputs]


class Scaled:
    """A function with a state, which a worker gets a copy of."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, outputs: Sequence[str]) -> list[float]:
        return [self.factor * reward for reward in length(outputs)]


def waits(outputs: Sequence[str], gate: Sequence[str]) -> list[float]:
    """Begins with a note, and ends when there is a file "open" beside it."""
    with Path(gate[0], "began").open("a") as notes:
        notes.write(f"{outputs[0]}\n")
    while not Path(gate[0], "open").exists():
        time.sleep(0.01)
    return length(outputs)


async def _noted(log: str, name: str) -> None:
    for what in ("begins", "ends"):
        with Path(log).open("a") as notes:
            notes.write(f"{name} {what}\n")
        await asyncio.sleep(0.05)


async def _of_one(output: str) -> float:
    if output == "bad":
        raise ValueError("no reward for bad")
    return float(len(output))


def brightness(images: Sequence[Any], prompts: Sequence[str]) -> list[float]:
    return [sum(row[0]) / len(row[0]) for row, _ in zip(images, prompts, strict=True)]


class Odd:
    """One of these functions as it is for outputs of even length, and with its fault for the others.

    rank: the only process of a run in which there is a fault; None: any.
    """

    def __init__(self, name: str, rank: int | None = None) -> None:
        self.name = name
        self.rank = rank

    def __call__(self, outputs: Sequence[str], goals: Sequence[Any] = ()) -> list[float]:
        here = self.rank is None or os.environ["RANK"] == str(self.rank)
        seen = ["bad" if here and len(output) % 2 else output for output in outputs]
        keys = {"goals": goals} if self.name == "mutates" else {}
        rewards: list[float] = globals()[self.name](seen, **keys)
        return rewards


def even(outputs: Sequence[str]) -> list[float | None]:
    """What is left of such a function when its faults are abstentions."""
    return [None if len(output) % 2 else float(len(output)) for output in outputs]


def word(image: Any) -> str:
    """What stands for an image in the functions above: all its pixels say how long it is."""
    pixels = image.tobytes() if hasattr(image, "tobytes") else (image * 255).round().flatten().int().tolist()
    return "x" * (1 + sum(pixels) % 50)


class OddImages(Odd):
    """Of images, PIL's or tensors."""

    def __call__(self, images: Sequence[Any], goals: Sequence[Any] = ()) -> list[float]:
        return super().__call__([word(image) for image in images], goals)


def even_images(images: Sequence[Any]) -> list[float | None]:
    return even([word(image) for image in images])


def size_of(images: Sequence[Any]) -> list[float]:
    return [float(len(word(image))) for image in images]


async def size_of_later(images: Sequence[Any]) -> list[float]:
    await asyncio.sleep(0.01)
    return size_of(images)


def blackens(images: Any, prompts: list[str], goals: list[dict[str, Any]]) -> list[float]:
    rewards = size_of(images)
    for image in images:
        image.paste(0, (0, 0, *image.size)) if hasattr(image, "paste") else image.zero_()
    prompts.clear()
    goals[0]["name"] = "seen"
    return rewards


def prints_images(images: Sequence[Any]) -> list[float]:
    print(prints(["bad"]), images[0])
    return size_of(images)


def counts_images(images: Sequence[Any]) -> list[float]:
    return counts(["" for _ in images])


def vowels(outputs: Sequence[str]) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in output)) for output in outputs]


class Longest:
    """A judge."""

    def compare(self, pairs: Sequence[tuple[str, str]]) -> list[int | None]:
        return [None if len(a) == len(b) else int(len(a) < len(b)) for a, b in pairs]


class Unreadable:
    """Can be sent, and not be received."""

    def __reduce__(self) -> Any:
        return _unreadable, ()


def _unreadable() -> Any:
    raise ZeroDivisionError("not here")


class Picky:
    """A judge that fails on answers of odd length."""

    def compare(self, pairs: Sequence[tuple[str, str]]) -> list[int | None]:
        if any(len(a) % 2 for a, _ in pairs):
            raise ValueError("odd")
        return Longest().compare(pairs)
