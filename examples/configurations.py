"""Load the configurations of the examples, from any folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

import trlx_like

ROOT = Path(__file__).resolve().parents[1]


def load(name: str) -> trlx_like.TRLConfig:
    """Load `configs/<name>.yml`, with the absolute paths of the files in `examples/` that it names."""
    return trlx_like.TRLConfig.from_dict(
        _located(yaml.safe_load((ROOT / "configs" / f"{name}.yml").read_text("utf-8")))
    )


def _located(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _located(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_located(item) for item in value]
    return str(ROOT / value) if isinstance(value, str) and value.startswith("examples/") else value
