"""What `scripts/test.py --quick` leaves out, by measured times; loaded as a pytest plugin, as is the measuring.

`durations.json` has the CPU seconds of each measured file, and those of one case of each of its test functions that is
not cheap, fixtures and child processes included. A quick run has every case of the cheap functions, the first case of
those up to `LIMIT`, and of a file that would have none its cheapest; of a file that was not measured, its first test.
`scripts/test.py --measure` writes the times of what it runs: of everything, or of the folders and files it is given.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
CHEAP = 0.05
LIMIT = 0.08


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out what durations.json says is slow")
    parser.addoption("--measure", action="store_true", help="write durations.json")


def function_of(name: str) -> str:
    """Return the name of a test without its parameters."""
    return name.partition("[")[0]


def kept(names: list[str], seconds: dict[str, float]) -> list[str]:
    """Choose the tests of a quick run: at least one from each file.

    Args:
        names: Names as pytest shows them, in order; the cases of a function stand together.
        seconds: CPU seconds of each measured file, and of a case of each of its functions that is not cheap.

    Returns:
        The names that are run, in their order.
    """
    chosen: set[str] = set()
    files: defaultdict[str, list[str]] = defaultdict(list)
    seen: set[str] = set()
    for name in names:
        file, function = name.partition("::")[0], function_of(name)
        cost = seconds.get(function, 0.0 if file in seconds else math.inf)
        if cost < CHEAP or (cost <= LIMIT and function not in seen):
            chosen.add(name)
        seen.add(function)
        files[file].append(name)
    for cases in files.values():
        if chosen.isdisjoint(cases):
            chosen.add(min(cases, key=lambda name: seconds.get(function_of(name), 0.0)))
    return [name for name in names if name in chosen]


def updated(known: Mapping[str, float], cases: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Replace what was known of the files that were measured by the seconds of the cases of their functions."""
    files: defaultdict[str, float] = defaultdict(float)
    for name, seconds in cases.items():
        files[name.partition("::")[0]] += sum(seconds)
    kept = {name: seconds for name, seconds in known.items() if name.partition("::")[0] not in files}
    means = {name: sum(seconds) / len(seconds) for name, seconds in cases.items()}
    found = {**files, **{name: mean for name, mean in means.items() if mean >= CHEAP}}
    return dict(sorted({**kept, **{name: round(seconds, 2) for name, seconds in found.items()}}.items()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        run = set(kept([item.nodeid for item in items], json.loads(DURATIONS.read_text())))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in run])
        items[:] = [item for item in items if item.nodeid in run]


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[STARTED] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    result = yield
    item.user_properties.append(("cpu", cpu_seconds() - item.stash[STARTED]))
    return result


STARTED = pytest.StashKey[float]()


class Measured:
    """Collects the seconds of all tests, also from the workers of pytest-xdist, and writes the file."""

    def __init__(self) -> None:
        self.cases: defaultdict[str, list[float]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self.cases[function_of(report.nodeid)] += [
                float(str(s)) for name, s in report.user_properties if name == "cpu"
            ]

    def pytest_sessionfinish(self) -> None:
        known = json.loads(DURATIONS.read_text()) if DURATIONS.is_file() else {}
        DURATIONS.write_text(json.dumps(updated(known, self.cases), indent=0) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--measure") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Measured())
