"""Former names that plugins may import or read are the same things as the present ones."""

from __future__ import annotations

from trlx_like.samplers import engines, generators


def test_engines_were_called_generators() -> None:
    assert generators.GENERATORS is engines.ENGINES
    assert generators.Generator is engines.Engine
    assert generators.TransformersGenerator is engines.TransformersEngine
    assert generators.register_generator == engines.register_engine
