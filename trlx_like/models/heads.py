"""Small networks on top of a language model's hidden states, kept in float32."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from trlx_like.functional.q_learning import polyak


def _two_layers(hidden_size: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(hidden_size, 2 * hidden_size), nn.ReLU(), nn.Linear(2 * hidden_size, outputs))


class ValueHead(nn.Module):
    """One value a state, from a two-layer network: hidden states [..., H] -> values [...].

    The last layer starts at a tenth of the usual scale: random values are a random baseline, whose loss would pull at
    the policy's own layers before anything is learned. Not at zero, which would keep the first layer from learning.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.layers = _two_layers(hidden_size, 1)
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.weight.mul_(0.1)
            last.bias.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.layers(hidden.float())
        return values.squeeze(-1)


class QHead(nn.Module):
    """One value for every token that may follow a state: hidden states [..., H] -> [..., V]."""

    def __init__(self, hidden_size: int, vocabulary: int) -> None:
        super().__init__()
        self.layers = _two_layers(hidden_size, vocabulary)

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.layers(hidden.float())
        return values


class ILQLHeads(nn.Module):
    """V, one or two Q, and for each Q a target: a frozen copy that follows it slowly (Snell et al. 2022)."""

    def __init__(self, hidden_size: int, vocabulary: int, two_qs: bool = True) -> None:
        super().__init__()
        self.value = ValueHead(hidden_size)
        self.qs = nn.ModuleList([QHead(hidden_size, vocabulary) for _ in range(1 + two_qs)])
        self.targets = copy.deepcopy(self.qs).requires_grad_(False)

    def target_q(self, states: Tensor) -> Tensor:
        """The smallest target Q of every token: states [N, H] -> [N, V]. No gradient."""
        with torch.no_grad():
            return torch.stack([target(states) for target in self.targets]).amin(dim=0)

    @torch.no_grad()
    def sync(self, alpha: float) -> None:
        """Takes over a share of each Q into its target (Polyak)."""
        for online, target in zip(self.qs.parameters(), self.targets.parameters(), strict=True):
            target.copy_(polyak(online, target, alpha))
