"""Shared by the comparisons of learned with exact values: expectiles, an exported model, its run, and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from trlx_like.functional.q_learning import guided_logits
from trlx_like.samplers.guided import load_ilql_heads

Floats = npt.NDArray[np.float64]
SIZE = 300
"""Width and height of a panel of the picture."""


@dataclass
class Panel:
    """Hold learned and exact values [N] for the picture, and the group of each point, which gives its colour.

    label: Names a group by its number: "{} moves" for "3 moves".
    """

    title: str
    exact: Floats
    learned: Floats
    groups: npt.NDArray[np.int64]
    label: str


def expectiles(x: Floats, weights: npt.ArrayLike, tau: float) -> Floats:
    """Solve tau sum w (x - v)+ = (1 - tau) sum w (v - x)+ for v in each row of x [N, K]; 0 for rows without weight."""
    weights = np.asarray(weights, dtype=float)
    v = np.zeros(len(x))
    seen = weights.sum(axis=1) > 0
    low = np.where(weights > 0, x, np.inf).min(axis=1, where=seen[:, None], initial=np.inf)
    v[seen] = low[seen]
    for _ in range(100):
        pull = weights * np.where(x > v[:, None], tau, 1 - tau)  # the asymmetric weights at the current v
        new = np.where(seen, (pull * x).sum(axis=1) / np.where(seen, pull.sum(axis=1), 1), 0.0)
        if np.array_equal(new, v):
            break
        v = new
    return v


def correlation(x: Floats, y: Floats, weights: Floats) -> float:
    """Compute the correlation of two arrays under weights, 0 if one is constant."""
    mean_x, mean_y = np.average(x, weights=weights), np.average(y, weights=weights)
    var_x, var_y = np.average((x - mean_x) ** 2, weights=weights), np.average((y - mean_y) ** 2, weights=weights)
    both = np.average((x - mean_x) * (y - mean_y), weights=weights)
    return float(both / (var_x * var_y) ** 0.5) if var_x * var_y > 0 else 0.0


def model_folder(run: Path) -> Path:
    """Return the exported model of a run's last checkpoint; the folder itself if it is a model."""
    exports = sorted(run.glob("checkpoint_*/hf_model"), key=lambda path: int(path.parent.name.split("_")[1]))
    return exports[-1] if exports else run


class Reader:
    """Ask an exported model with ILQL heads what comes after texts.

    Args:
        folder: The exported model.
        tokenizer: Pads on the left.
    """

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.lm: Any = AutoModelForCausalLM.from_pretrained(folder)
        self.heads = load_ilql_heads(folder)
        self.tokenizer = tokenizer
        if self.heads is None:
            raise SystemExit(f"{folder} has no ILQL heads.")
        self.lm.eval()

    @torch.no_grad()
    def __call__(self, texts: Sequence[str], beta: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits of the next token guided with `beta` [B, V], V [B] and the target Q [B, V]."""
        assert self.heads is not None
        batch = self.tokenizer(list(texts), return_tensors="pt", padding=True, add_special_tokens=False)
        out = self.lm(batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True)
        hidden = out.hidden_states[-1][:, -1]  # [B, H]
        values, q = self.heads.value(hidden), self.heads.target_q(hidden)
        return guided_logits(out.logits[:, -1], q, values, beta), values, q


def picture(panels: Sequence[Panel]) -> str:
    """Draw learned against exact values as SVG, side by side."""
    named = {int(group): panel.label.format(int(group)) for panel in panels for group in panel.groups}
    hues = {group: 300 * place // max(len(named) - 1, 1) for place, group in enumerate(sorted(named))}
    parts = []
    for number, panel in enumerate(panels):
        exact, found = panel.exact, panel.learned
        low, high = float(min(exact.min(), found.min())), float(max(exact.max(), found.max()))
        left, scale = 50 + number * (SIZE + 70), SIZE / (high - low or 1.0)
        box = f'x="{left}" y="40" width="{SIZE}" height="{SIZE}" fill="none" stroke="#555"'
        parts.append(f'<rect {box}/><text x="{left}" y="25" font-size="14">{panel.title}</text>')
        parts.append(f'<path d="M{left} {40 + SIZE}L{left + SIZE} 40" stroke="#999" stroke-dasharray="4 3"/>')
        for value, place in ((low, 0.0), (high, float(SIZE))):
            parts.append(f'<text x="{left + place:.0f}" y="{56 + SIZE}" text-anchor="middle">{value:.1f}</text>')
            parts.append(f'<text x="{left - 6}" y="{44 + SIZE - place:.0f}" text-anchor="end">{value:.1f}</text>')
        for x, y, group in zip(exact, found, panel.groups, strict=True):
            at = f'cx="{left + (x - low) * scale:.1f}" cy="{40 + SIZE - (y - low) * scale:.1f}"'
            parts.append(f'<circle {at} r="3" fill="hsl({hues[int(group)]},70%,45%)" fill-opacity=".5"/>')
        parts.append(f'<text x="{left + SIZE / 2:.0f}" y="{72 + SIZE}" text-anchor="middle">exact</text>')
    keys = [
        f'<text x="{50 + 70 * place}" y="{SIZE + 96}" fill="hsl({hue},70%,45%)">{named[group]}</text>'
        for place, (group, hue) in enumerate(hues.items())
    ]
    width = 70 + max(len(panels) * (SIZE + 70), 70 * len(keys))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {SIZE + 110}" font-family="sans-serif" '
    return head + 'font-size="12">' + "\n".join([*parts, *keys]) + "</svg>\n"
