"""Small networks on top of a language model's hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """One value a state, from a two-layer network kept in float32: hidden states [..., H] -> values [...]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(hidden_size, 2 * hidden_size), nn.ReLU(), nn.Linear(2 * hidden_size, 1))

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.layers(hidden.float())
        return values.squeeze(-1)
