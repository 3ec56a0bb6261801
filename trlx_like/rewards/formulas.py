"""Answers of mathematics: finding them in texts, and comparing them as numbers or as formulas."""

from __future__ import annotations

import math
import random
import re

_NUMBER = re.compile(r"[-\u2212]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?:\s*/\s*-?\d[\d,]*)?")
_HUGE = re.compile(r"\d{4}|\^[^+*/-]*\^|\*\*")
_FORMULA = re.compile(r"(?:\d++(?:\.\d++)?|sqrt|pi|sin|cos|tan|log|exp|[a-z](?![a-z])|[-+*/^() ])+")  # in linear time
_FRACTION = re.compile(r"(-?)\(\((-?[\d,.]+)\)/\((-?[\d,.]+)\)\)")
_TEX = [
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\u2212", "-"),
        (r"\\(?:left|right)(?![a-z])|\\[$%,;:! ]|\{,\}|\^\{?\\circ\}?|[$%]", ""),
        (r"(?<=.)\\(?:text\w*|mathrm|mbox)\{[^{}]*\}$", ""),
        (r"\\(?:text\w*|mathrm|mathbf|mbox)\{([^{}]*)\}", r"\1"),
        (r"\\sqrt(?:\{([^{}]*)\}|(\d))", r"sqrt(\1\2)"),
        (r"\\[dt]?frac(?:\{([^{}]*)\}\{([^{}]*)\}|(\d)(\d))", r"((\1\3)/(\2\4))"),
        (r"\\(pi|sin|cos|tan|log|exp)(?![a-z])", r"\1"),
        (r"\\(?:cdot|times)(?![a-z])", "*"),
        (r"^\s*[a-zA-Z]\s*=", ""),
    )
]
"""What is rewritten in formulas of LaTeX, until nothing changes: units and spacing go, fractions become quotients."""


def answer_of(text: str) -> str | None:
    r"""Return what the last \boxed{...} holds, else the last number; None without either."""
    start = text.rfind("\\boxed{")
    if start < 0:
        numbers = _NUMBER.findall(text)
        return numbers[-1] if numbers else None
    depth, begin = 1, start + len("\\boxed{")
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[begin:place]
    return None


def reference_of(text: str) -> str | None:
    """Return the answer in a reference: all of it if it has no words, as "\\frac{3}{4}", else as in an output."""
    plain = _plain(text)
    words = re.search(r"[^\W\d_]{2}|[=\n#]", re.sub(r"\\[a-zA-Z]+|sqrt|pi|sin|cos|tan|log|exp", "", plain))
    return answer_of(text) if words or "\\boxed" in text or not plain else text


def agree(answer: str | None, wanted: str, tolerance: float, symbolic: bool) -> bool:
    """Tell whether an answer is the one that is wanted.

    Args:
        answer: The answer; None if there is none.
        wanted: The answer of the reference.
        tolerance: Relative difference that is allowed between numbers.
        symbolic: Whether to compare formulas, by sympy if it is installed.
    """
    first, second = _number(answer), _number(wanted)
    if first is not None and second is not None:
        return abs(first - second) <= tolerance * max(1.0, abs(second))
    return answer is not None and symbolic and _same_formula(answer, wanted)


def _number(text: str | None) -> float | None:
    plain = _plain(text or "").rstrip(".")
    if fraction := _FRACTION.fullmatch(plain):
        plain = f"{fraction[1]}{fraction[2]}/{fraction[3]}"
    if not _NUMBER.fullmatch(plain):
        return None
    above, _, below = plain.replace(",", "").partition("/")
    return float(above) / float(below) if below and float(below) else None if below else float(above)


def _same_formula(first: str, second: str) -> bool:
    """Compare two formulas at five points; without sympy, as text. What could run code is compared as text.

    Nothing is simplified or multiplied out, which may take for ever: (a + b + c + d + e + f)^99.
    """
    plain = [_plain(text).rstrip(".").replace("{", "(").replace("}", ")") for text in (first, second)]
    if plain[0].replace(" ", "") == plain[1].replace(" ", ""):
        return True
    if any(len(text) > 100 or not _FORMULA.fullmatch(text) or _HUGE.search(text) for text in plain):
        return False
    try:
        from sympy.parsing import sympy_parser as parser
    except ImportError:
        return False
    rules = (*parser.standard_transformations, parser.convert_xor, parser.implicit_multiplication_application)
    points = random.Random(0)
    try:
        sides = [parser.parse_expr(text, transformations=rules, evaluate=False) for text in plain]
        names = sorted(set().union(*(side.free_symbols for side in sides)), key=str)
        for _ in range(5):
            point = {name: points.uniform(-2, 2) for name in names}
            one, other = (complex(side.evalf(30, subs=point)) for side in sides)
            if not abs(one - other) <= 1e-9 * max(1.0, abs(other)) < math.inf:
                return False
    except Exception:  # text that is no formula, or too large for a number
        return False
    return True


def _plain(text: str) -> str:
    """Rewrite what LaTeX writes around numbers, and its fractions and roots, as plain text."""
    before = None
    while text != before:
        before = text
        for pattern, new in _TEX:
            text = pattern.sub(new, text)
    return text.strip()
