"""Mutation testing: plants one small bug at a time, and looks whether the tests that belong to the module see it.

    python scripts/mutation.py                                 # functional/, data/ and trainers/optimise.py
    python scripts/mutation.py trlx_like/functional/kl.py --sample 20 --seed 1

The mutations are those of `mutations` below. A module's tests are found by the rule of tests/unit/test_mirror.py. Each
mutant runs in a fork of a process that has torch and the tests' other libraries loaded already, so it costs what its
tests cost, which stop at the first that fails. (mutmut mutates messages too and needs a second tree; cosmic-ray starts
a Python with torch for each mutant.) A mutant that survives is a bug that no test would see, or it changes nothing that
can be seen; tests/mutants.yml lists those with the reason. The command fails for a survivor that is not listed there,
and for less than 95 % killed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import gc
import importlib.machinery
import inspect
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ("trlx_like/functional", "trlx_like/data", "trlx_like/trainers/optimise.py")
SURVIVORS = ROOT / "tests" / "mutants.yml"
ENOUGH = 0.95

OPERATORS: dict[type[ast.AST], type[Any]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult},
    **{ast.FloorDiv: ast.Div, ast.Mod: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or},
    **{ast.Or: ast.And, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
NAMES = {
    **{"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "amin": "amax", "amax": "amin"},
    **{"argmin": "argmax", "argmax": "argmin", "any": "all", "all": "any", "sum": "mean", "mean": "sum"},
    **{"exp": "expm1", "expm1": "exp", "log": "log1p", "log1p": "log", "sqrt": "square", "floor": "ceil"},
    **{"zeros": "ones", "zeros_like": "ones_like", "ones": "zeros", "ones_like": "zeros_like"},
}
DROPPED_CALLS = {
    "abs",
    "clamp",
    "clamp_min",
    "clamp_max",
    "detach",
    "flip",
    "softmax",
    "log_softmax",
    "double",
    "float",
}
"""Methods whose call is replaced by the object that they are called on."""
NOT_MUTATED = {"strict", "bound", "dtype", "device"}
"""Keywords that check or place values, or are for type checkers."""


@dataclass(frozen=True)
class Mutant:
    """Describe one planted bug: its place in the source, the place in words, and the change."""

    number: int
    line: int
    where: str
    change: str
    function: str  # outermost function that it is in the body of; empty: none

    def __str__(self) -> str:
        return f"{self.line}: {self.where}: {self.change}"


def mutations(node: ast.AST) -> Iterator[ast.AST | None]:
    """Yield what may take the place of a node; None drops a statement or a keyword."""
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in OPERATORS:
        yield replaced(node, op=OPERATORS[type(node.op)]())
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in OPERATORS:
        yield replaced(node, ops=[OPERATORS[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield replaced(node, test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield replaced(node, ifs=[])
    elif isinstance(node, ast.Attribute | ast.Name) and (name := getattr(node, "attr", getattr(node, "id", ""))):
        if name in NAMES:
            yield replaced(node, **{"attr" if isinstance(node, ast.Attribute) else "id": NAMES[name]})
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in DROPPED_CALLS:
        inner = node.func.value
        module = isinstance(inner, ast.Name) and inner.id in ("torch", "functional")
        yield node.args[0] if module and node.args else inner
    elif isinstance(node, ast.keyword):
        yield None
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()


def replaced(node: ast.AST, **fields: Any) -> ast.AST:
    """Return a copy of a node with other fields."""
    made = copy.copy(node)
    vars(made).update(fields)
    return made


class _Mutator(ast.NodeTransformer):
    """Count the mutants of a tree, and make the one with the wanted number."""

    def __init__(self, source: str, wanted: int | None = None) -> None:
        self.lines, self.wanted, self.mutants = source.splitlines(), wanted, list[Mutant]()
        self._names: list[str] = []
        self._function = ""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom) or _is_message(node):
            return node
        if isinstance(node, ast.keyword) and node.arg in NOT_MUTATED:
            return node
        named = isinstance(node, ast.FunctionDef | ast.ClassDef)
        if named:
            self._names.append(node.name)  # type: ignore[attr-defined]
        chosen: list[ast.AST | None] = []
        for change in mutations(node):
            if self.wanted == len(self.mutants):
                chosen.append(change)
            where = ".".join(self._names) or "module"
            new = "nothing" if change is None else _words(change)
            text, line = f"{_words(node)} -> {new}", getattr(node, "lineno", 0)
            if len(text) < 30 and line:  # not clear by itself
                text += f" in {self.lines[line - 1].strip()}"
            self.mutants.append(Mutant(len(self.mutants), line, where, text, self._function))
        self.generic_visit(node)
        if named:
            self._names.pop()
        return chosen[0] if chosen else node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
                continue
            outermost = name == "body" and isinstance(node, ast.FunctionDef) and not self._function
            if outermost:
                self._function = ".".join(self._names)
            if isinstance(value, list):
                new = [self.visit(item) if isinstance(item, ast.AST) else item for item in value]
                pairs = zip(new, value, strict=True)  # a key of None stands for the ** in {**values}
                setattr(node, name, [item for item, old in pairs if item is not None or old is None])
            elif isinstance(value, ast.AST):
                setattr(node, name, self.visit(value))
            if outermost:
                self._function = ""
        return node


def _is_message(node: ast.AST) -> bool:
    """Return whether a node is a docstring or a call of the logger."""
    value = node.value if isinstance(node, ast.Expr) else None
    called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return isinstance(value, ast.Constant) or called.startswith(("logger.", "warnings."))


def _words(node: ast.AST) -> str:
    """Return the source of a node in one line; of a statement with a body, its head."""
    if isinstance(node, ast.keyword | ast.comprehension):
        return ast.unparse(node).strip()
    return ast.unparse(node).splitlines()[0]


def mutants_of(source: str) -> list[Mutant]:
    """Return all mutants of a module's source."""
    counter = _Mutator(source)
    counter.visit(ast.parse(source))
    return counter.mutants


def mutated(source: str, number: int, file: str) -> CodeType:
    """Compile a module's source with the mutant of this number."""
    tree = _Mutator(source, number).visit(ast.parse(source))
    return compile(ast.fix_missing_locations(tree), file, "exec")


def belonging_tests(module: str) -> list[str]:
    """Return the test files that belong to a module, such as `functional/kl`, by the rule of the mirror test."""
    from tests.unit.test_mirror import ELSEWHERE

    part, _, name = module.rpartition("/")
    own = sorted((ROOT / "tests" / "unit" / part).glob(f"test_{name}.py"))
    own += sorted((ROOT / "tests" / "unit" / part).glob(f"test_{name}_*.py"))
    others = [file for file in own if _longer_name(module, file.stem.removeprefix("test_"))]
    return [str(file.relative_to(ROOT)) for file in own if file not in others] or [ELSEWHERE[module]]


def _longer_name(module: str, name: str) -> bool:
    """Return whether a test file belongs to another module of the same folder, as test_kl_x.py does to kl_x.py."""
    return name != module.rpartition("/")[2] and (ROOT / "trlx_like" / module).with_name(f"{name}.py").is_file()


class Runner:
    """Run the tests of one module, with one mutant at a time.

    Args:
        file: The module, relative to the root.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.source = (ROOT / file).read_text(encoding="utf-8")
        self.name = file.removesuffix(".py").replace("/", ".")
        self.tests = belonging_tests(file.removeprefix("trlx_like/").removesuffix(".py"))

    def survivors(self, mutants: Sequence[Mutant]) -> list[Mutant]:
        """Return the mutants that no test of the module fails for.

        A mutant inside a function takes the place of its code after the tests were collected. Any other has to be
        there when the module is imported, and the tests are collected with it.
        """
        for mutant in mutants:
            mutated(self.source, mutant.number, self.file)  # one that cannot be made would look like a kill
        failed = self._session([None, *(mutant for mutant in mutants if mutant.function)], None)
        if failed[None]:
            raise SystemExit(f"{self.file}: {failed[None]} fails without a mutant.")
        for mutant in mutants:
            if failed.get(mutant.number) is None:  # a survivor too: its function may run while modules are imported
                failed |= self._session([mutant], mutant)
        return [mutant for mutant in mutants if failed[mutant.number] is None]

    def _session(self, mutants: Sequence[Mutant | None], imported: Mutant | None) -> dict[int | None, str | None]:
        """Return for each mutant the test that fails first, from a process that collects the tests once."""
        with tempfile.NamedTemporaryFile("r") as results:
            child = os.fork()
            if child == 0:
                try:
                    self._collect(_Loop(self, mutants, imported is None, Path(results.name)), imported)
                finally:
                    os._exit(1)
            os.waitpid(child, 0)
            failed = {row["mutant"]: row["failed"] for row in map(json.loads, results)}
        missing = f"the import of {self.file} or the collection of its tests"
        return {number: failed.get(number, missing) for number in (None if m is None else m.number for m in mutants)}

    def _collect(self, loop: _Loop, imported: Mutant | None) -> None:
        """Collect the tests; the loop runs them. Says nothing."""
        import pytest
        from hypothesis import settings

        settings.register_profile("mutation", deadline=None, derandomize=True, database=None)
        settings.load_profile("mutation")
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        if imported is not None:
            self._import(imported)
        with tempfile.TemporaryDirectory() as folder:
            options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={folder}/t"]
            pytest.main([*options, *self.tests], plugins=[loop])

    def _import(self, mutant: Mutant) -> None:
        """Make the import of the module give the mutant."""
        code = mutated(self.source, mutant.number, str(ROOT / self.file))
        real = importlib.machinery.SourceFileLoader.get_code

        def get_code(loader: Any, name: str) -> Any:
            return code if name == self.name else real(loader, name)

        importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]

    def replace(self, mutant: Mutant) -> None:
        """Give the mutated function of the imported module its code."""
        found: Any = sys.modules[self.name]
        for part in mutant.function.split("."):
            found = vars(found)[part]
        found = getattr(found, "fget", getattr(found, "func", found))
        found = inspect.unwrap(getattr(found, "__func__", found))
        codes = [mutated(self.source, mutant.number, str(ROOT / self.file))]
        for code in codes:  # grows
            codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        found.__code__ = [code for code in codes if code.co_qualname == mutant.function][-1]


class _Loop:
    """A pytest plugin that runs the collected tests once per mutant, each time in a fork.

    Tests that killed mutants before come first, then the quick ones.
    """

    def __init__(self, runner: Runner, mutants: Sequence[Mutant | None], replace: bool, results: Path) -> None:
        self.runner, self.mutants, self.replace, self.results = runner, mutants, replace, results
        self.kills: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}  # without a mutant
        self.limit = 600.0
        self.failed: str | None = None

    def pytest_runtestloop(self, session: Any) -> bool | None:
        if session.testsfailed or not session.items:
            return None  # pytest ends; without results, collecting counts as what failed
        for mutant in self.mutants:
            session.items.sort(
                key=lambda item: (self.seconds.get(item.nodeid, 0) + 0.01) / (1 + self.kills[item.nodeid])
            )
            row = self._forked(session, mutant)
            if mutant is None:
                self.seconds = row["seconds"]
                self.limit = 20 + 5 * sum(self.seconds.values())
            elif row["failed"]:
                self.kills[row["failed"]] += 1
            with self.results.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"mutant": mutant and mutant.number, "failed": row["failed"]}) + "\n")
        os._exit(0)

    def _forked(self, session: Any, mutant: Mutant | None) -> dict[str, Any]:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (int(self.limit), int(self.limit) + 1))
                signal.alarm(int(4 * self.limit))
                try:
                    if mutant is not None and self.replace:
                        self.runner.replace(mutant)
                except ValueError:  # it has other free variables; `survivors` tries it in an import
                    os.write(writer, json.dumps({"failed": None}).encode())
                    return {}
                with contextlib.suppress(session.Failed, session.Interrupted):
                    run_tests(session)
                os.write(writer, json.dumps({"failed": self.failed, "seconds": self.seconds}).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as said:
            text = said.read()
        os.waitpid(child, 0)
        return json.loads(text) if text else {"failed": "no result: ended, or out of time"}

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed = self.failed or report.nodeid


def run_tests(session: Any) -> None:
    """Run the collected tests as pytest does."""
    from _pytest.main import pytest_runtestloop

    pytest_runtestloop(session)


def known_survivors() -> dict[str, list[dict[str, str]]]:
    """Return the listed survivors by module, each with where, change and reason."""
    return yaml.safe_load(SURVIVORS.read_text(encoding="utf-8")) or {} if SURVIVORS.is_file() else {}


def preload() -> None:
    """Import what no mutant is in and every test needs, so that no fork has to."""
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    import hypothesis.extra.numpy
    import torch

    import trlx_like.config  # noqa: F401

    torch.set_num_threads(1)
    del hypothesis
    gc.freeze()


def try_module(file: str, sample: int | None, seed: int) -> tuple[int, int, list[Mutant]]:
    """Try the mutants of a module, or a random sample; return how many were tried and exist, and the survivors."""
    runner = Runner(file)
    every = mutants_of(runner.source)
    chosen = every if sample is None or sample >= len(every) else random.Random(seed).sample(every, sample)
    alive = runner.survivors(sorted(chosen, key=lambda mutant: mutant.number))
    for mutant in alive:
        print(f"  survived  {file}:{mutant}", flush=True)
    return len(chosen), len(every), alive


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the mutants of modules; print a line per module. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=TARGETS, help="modules and folders under trlx_like")
    parser.add_argument("--sample", type=int, help="try this many mutants of each module, drawn at random")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    given = parser.parse_args(arguments)
    preload()
    files: list[str] = []
    for target in given.targets:
        place = ROOT / target
        found = sorted(place.rglob("*.py")) if place.is_dir() else [place]
        files += [str(file.relative_to(ROOT)) for file in found if file.name != "__init__.py"]
    listed, unlisted, stale = known_survivors(), 0, 0
    tried = alive = 0
    for file in files:
        started = time.monotonic()
        count, every, survivors = try_module(file, given.sample, given.seed)
        reasons = {(entry["where"], entry["change"]) for entry in listed.get(file, [])}
        new = [mutant for mutant in survivors if (mutant.where, mutant.change) not in reasons]
        gone = reasons - {(mutant.where, mutant.change) for mutant in survivors} if count == every else set()
        tried, alive, unlisted, stale = tried + count, alive + len(survivors), unlisted + len(new), stale + len(gone)
        killed = f"{count - len(survivors)} of {count} killed" + (f" ({every} exist)" if count < every else "")
        print(
            f"{file}: {killed}, {len(new)} survivors without a reason, {time.monotonic() - started:.0f} s", flush=True
        )
        for where, change in sorted(gone):
            print(f"  listed in {SURVIVORS.name}, but killed: {where}: {change}", flush=True)
    share = 1 - alive / max(tried, 1)
    print(f"All: {tried - alive} of {tried} killed ({share:.1%}), {unlisted} survivors without a reason.")
    return int(bool(unlisted or stale or share < ENOUGH))


if __name__ == "__main__":
    raise SystemExit(main())
