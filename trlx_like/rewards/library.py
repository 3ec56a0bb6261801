"""Common reward functions, by name and with options: `data.reward_fn: {name: length, cap: 200}`.

Each function gets the outputs, the columns of the batch (the prompts' own keys and `output_ids`), and its options. It
returns one reward per output, or None for an output that it cannot judge.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from trlx_like.config.problems import expected
from trlx_like.errors import ConfigError
from trlx_like.rewards.formulas import agree, answer_of, reference_of
from trlx_like.rewards.programs import passes

Given = Callable[[str], Any]
"""Returns what a column holds for the sample that is scored."""
Count = Annotated[int, Field(ge=1)]

_FENCE = re.compile(r"```[\w+-]*\n(.*?)(?:```|\Z)", re.DOTALL)


def exact_match(
    output: str,
    given: Given,
    *,
    column: str = "reference",
    extract: str | None = None,
    case: bool = False,
) -> float | None:
    """Give 1 to an output that is the reference, up to spaces around it, else 0.

    Options:
        column: The key of the prompts that holds the reference.
        extract: Pattern of the answer in the output, whose last match (its first group, if it has one) is compared.
        case: Whether upper and lower case differ.
    """

    right, answer = given(column), _extracted(output, extract)
    if right is None or answer is None:
        return None if right is None else 0.0
    answer, right = answer.strip(), str(right).strip()
    return float(answer == right if case else answer.lower() == right.lower())


def numeric_match(
    output: str,
    given: Given,
    *,
    column: str = "reference",
    extract: str | None = None,
    tolerance: Annotated[float, Field(ge=0)] = 1e-6,
    symbolic: bool = True,
) -> float | None:
    r"""Give 1 to an output whose answer is the reference as a number, else 0.

    The answer is what the last \boxed{...} holds, else the last number; of the reference, too ("#### 72"), unless it is
    a formula.

    Options:
        column: The key of the prompts that holds the reference.
        extract: Pattern of the answer in the output, in place of a box or the last number.
        tolerance: Relative difference that is allowed.
        symbolic: Whether formulas in boxes are compared, by sympy if it is installed.
    """
    right = given(column)
    answer = answer_of(output) if extract is None else _extracted(output, extract)
    wanted = None if right is None else reference_of(str(right))
    return None if wanted is None else float(agree(answer, wanted, tolerance, symbolic))


def regex_match(output: str, given: Given, *, pattern: str, whole: bool = False) -> float | None:
    """Give 1 to an output in which a regular expression is found, else 0. A dot matches line breaks too.

    Options:
        pattern: The expression.
        whole: Whether it has to match all of the output, but for spaces around it.
    """
    found = re.fullmatch(pattern, output.strip(), re.DOTALL) if whole else re.search(pattern, output, re.DOTALL)
    return float(found is not None)


def tags(output: str, given: Given, *, names: Annotated[list[str], Field(min_length=1)]) -> float | None:
    """Give 1 to an output that is made of these tags, each once and in this order, else 0.

    Options:
        names: The names of the tags.
    """
    inner = rf"(?:(?!</?(?:{'|'.join(map(re.escape, names))})>).)*"
    pattern = r"\s*".join(rf"<{re.escape(name)}>{inner}</{re.escape(name)}>" for name in names)
    return regex_match(output, given, pattern=pattern, whole=True)


def json_valid(output: str, given: Given, *, schema: Mapping[str, Any] | None = None) -> float | None:
    """Give 1 to an output that is JSON, or has JSON between its first pair of three backquotes, else 0.

    Options:
        schema: The JSON schema that it has to fulfil (needs the package jsonschema).
    """
    try:
        value = json.loads(_code(output), parse_constant=int)  # which refuses NaN
    except (ValueError, RecursionError):
        return 0.0
    return float(schema is None or _validator(schema).is_valid(value))


def length(
    output: str,
    given: Given,
    *,
    target: Count | None = None,
    cap: Count | None = None,
    cache: Annotated[int, Field(ge=0)] = 0,
    unit: Literal["tokens", "words", "characters"] = "tokens",
) -> float | None:
    """Punish a wrong length: 0 for a right one, and down to -1.

    With a target, the reward falls linearly with the distance to it. With a cap it is 0 up to `cap - cache`, falls
    linearly to -1 at the cap, and is -1 above it (DAPO's soft overlong punishment, Yu et al. 2025, arXiv:2503.14476,
    eq. 13).

    Options:
        target: The length that is wanted.
        cap: The length that is too long.
        cache: Length before the cap over which the reward falls.
        unit: tokens, words or characters.
    """
    size = len(given("output_ids") if unit == "tokens" else output.split() if unit == "words" else output)
    if target is not None:
        return -min(abs(size - target) / target, 1.0)
    assert cap is not None
    return -1.0 if size > cap else -max(0.0, (size - (cap - cache)) / cache) if cache else 0.0


def repetition(output: str, given: Given, *, words: Count = 3) -> float | None:
    """Punish repetition: minus the fraction of runs of some words that occurred before in the same output.

    Options:
        words: The number of words in a run.
    """
    split = output.split()
    runs = [tuple(split[start : start + words]) for start in range(len(split) - words + 1)]
    return len(set(runs)) / len(runs) - 1.0 if runs else 0.0


def passes_tests(
    output: str,
    given: Given,
    *,
    column: str = "tests",
    seconds: Annotated[float, Field(gt=0)] = 5.0,
    memory: Count = 512,
) -> float | None:
    """Give the fraction of tests that the Python code of an output passes. This is no sandbox, see rewards/programs.py.

    Options:
        column: The key of the prompts with the tests: Python code, or a list of pieces of it that each count.
        seconds: Time limit of each test.
        memory: Memory limit of each test, in MiB.
    """
    tests = given(column)
    listed = [tests] if isinstance(tests, str) else list(tests or ())
    passed = [passes(_code(output), test, seconds, memory) for test in listed]
    return sum(passed) / len(passed) if passed else None


FUNCTIONS: dict[str, Callable[..., float | None]] = {
    function.__name__: function
    for function in (exact_match, numeric_match, regex_match, tags, json_valid, length, repetition, passes_tests)
}
"""The functions by the name that `data.reward_fn` knows them under."""


class NamedReward:
    """Hold a function of the library with its options; called as `train` calls a reward function.

    Args:
        name: The name of the function.
        options: Its options.
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.label, self.options = name, dict(options)
        column = inspect.signature(FUNCTIONS[name]).parameters.get("column")
        self.required_keys = [] if column is None else [self.options.get("column", column.default)]

    def __call__(self, *, outputs: Sequence[str], output_ids: Any = None, **columns: Any) -> list[float | None]:
        function = partial(FUNCTIONS[self.label], **self.options)
        columns["output_ids"] = output_ids
        return [function(output, lambda key, row=row: columns[key][row]) for row, output in enumerate(outputs)]


def named_reward(spec: Mapping[str, Any], option: str = "reward_fn") -> NamedReward:
    """Make a reward function from its name and options.

    Args:
        spec: A mapping with `name`, one of `FUNCTIONS`, and its options.
        option: The name of `spec` in errors.

    Raises:
        ConfigError: The function is unknown, an option is unknown or missing, or a value is impossible.
    """
    options = dict(spec)
    name = options.pop("name", None)
    if name not in FUNCTIONS:
        raise ConfigError(f"{option}.name ({name!r}) must be rubric or one of {', '.join(FUNCTIONS)}.")
    known = {p.name: p for p in inspect.signature(FUNCTIONS[name]).parameters.values() if p.kind is p.KEYWORD_ONLY}
    unknown = [key for key in options if key not in known]
    missing = [key for key, p in known.items() if p.default is p.empty and key not in options]
    if unknown or missing:
        raise ConfigError(f"{option}: {name} has the options {', '.join(known)}, not {', '.join(options) or 'none'}.")
    hints = get_type_hints(FUNCTIONS[name], include_extras=True)
    for key, value in options.items():
        try:
            TypeAdapter(hints[key], config=ConfigDict(strict=True, allow_inf_nan=False)).validate_python(value)
        except ValidationError:
            raise ConfigError(f"{option}.{key} ({value!r}) must be {expected(hints[key])}.") from None
    if name == "length":
        target, cap, cache = options.get("target"), options.get("cap"), options.get("cache", 0)
        if (target is None) == (cap is None) or cache > (cap or 0):
            raise ConfigError(f"{option}: length needs a target or a cap above 0, and a cache only up to its cap.")
    for key in ("pattern", "extract"):
        try:
            re.compile(options.get(key) or "")
        except re.error as error:
            raise ConfigError(f"{option}.{key} ({options[key]!r}) is no regular expression: {error}.") from None
    if options.get("schema") is not None:
        _check_schema(options["schema"], option)
    return NamedReward(name, options)


def _extracted(output: str, pattern: str | None) -> str | None:
    if pattern is None:
        return output
    found = list(re.finditer(pattern, output, re.DOTALL))
    return (found[-1][1] if found[-1].re.groups else found[-1][0]) if found else None


def _code(output: str) -> str:
    """Return what stands between the first pair of three backquotes, else the whole output."""
    found = _FENCE.search(output)
    return found[1] if found else output


def _check_schema(schema: Mapping[str, Any], option: str) -> None:
    try:
        from jsonschema import SchemaError
    except ImportError as error:
        raise ConfigError(f"{option}.schema needs the package jsonschema (pip install jsonschema).") from error
    try:
        _validator(schema).check_schema(dict(schema))
    except SchemaError as error:
        raise ConfigError(f"{option}.schema is no JSON schema: {error.message}.") from None


def _validator(schema: Mapping[str, Any]) -> Any:
    from jsonschema.validators import validator_for

    return validator_for(schema)(schema)
