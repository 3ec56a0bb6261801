"""Answers of mathematics, as the reward `numeric_match` compares them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.rewards.test_library import references, rewards


@pytest.mark.parametrize(
    ("output", "reference", "reward"),
    [
        ("5 boxes of 14 are 70, plus 2: 72", "48+24 = <<48+24=72>>72\n#### 72", 1),
        ("about 1,250.0 in all", 1250, 1),
        ("It is 1/4.", "0.25", 1),
        ("-3", "3", 0),
        ("no number", "3", 0),
        (r"so \boxed{\frac{1}{2}} of 9", "0.5", 1),
        (r"\boxed{x^2+2x+1}", r"\boxed{(x+1)^2}", 1),
        (r"\boxed{x^2+2x}", r"\boxed{(x+1)^2}", 0),
        (r"\boxed{2\sqrt{3}}", r"$\boxed{\sqrt{12}}$", 1),
        (r"\boxed{9^9^9^9}", r"\boxed{x}", 0),  # at once
        (r"\boxed{(a+b+c+d+e+f)^99}", r"\boxed{x}", 0),  # at once
        (r"\boxed{((9^999+1)^999+1)^999}", r"\boxed{x/x}", 0),  # at once
        (r"\boxed{\sin(x)^2+\cos(x)^2}", r"\boxed{y/y}", 1),
        (r"\boxed{\sqrt{x^2}}", r"\boxed{x}", 0),  # they differ below 0
        (r"\boxed{__import__('os')}", r"\boxed{x}", 0),
        (r"\boxed{1", "1", 0),
        ("It is .5, or 5e-1", "1/2", 1),
        ("\u22125", "5", 0),
        (r"\boxed{\$10{,}000\text{ in all}}", "10000", 1),
        (r"\boxed{90^\circ}", "90", 1),
        (r"\boxed{x = \frac12}", r"\frac{1}{2}", 1),  # as in MATH-500
        (r"\boxed{\frac{1}{\sqrt2}}", r"\frac{\sqrt{2}}{2}", 1),
        (r"\boxed{2}", r"\frac{3}{2}", 0),
        (r"\boxed{\left(3, \frac{\pi}{2}\right)}", r"(3,\dfrac{\pi}{2})", 1),
        (r"\boxed{2\frac{1}{2}}", "10.5", 0),
        (r"\boxed{3." + "1" * 60 + r"\ldots}", r"\boxed{x}", 0),  # at once
        ("1", None, None),
        ("1", "none", None),
    ],
)
def test_numeric_match(output: str, reference: Any, reward: float | None) -> None:
    pytest.importorskip("sympy")
    assert rewards([output], keys=references(reference), name="numeric_match") == [reward]
