"""Small networks on top of a language model's hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """One value a state, from a two-layer network kept in float32: hidden states [..., H] -> values [...].

    The last layer starts at a tenth of the usual scale: random values are a random baseline, whose loss would pull at
    the policy's own layers before anything is learned. Not at zero, which would keep the first layer from learning.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        last = nn.Linear(2 * hidden_size, 1)
        with torch.no_grad():
            last.weight.mul_(0.1)
            last.bias.zero_()
        self.layers = nn.Sequential(nn.Linear(hidden_size, 2 * hidden_size), nn.ReLU(), last)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.layers(hidden.float())
        return values.squeeze(-1)
