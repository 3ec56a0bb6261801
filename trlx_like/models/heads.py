"""Small networks on a language model's last hidden states, kept in float32."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from trlx_like.errors import ConfigError
from trlx_like.models.faster import faster


def _in_float32(layers: nn.Module, hidden: Tensor) -> Tensor:
    """Apply layers without autocast."""
    with torch.autocast(hidden.device.type, enabled=False):
        return cast(Tensor, layers(hidden.float()))


class QHead(nn.Module):
    """A two-layer network, twice as wide inside, that predicts Q of every token: hidden states [..., H] -> Q [..., V].

    Args:
        hidden_size: The width of the hidden states, H.
        vocabulary: The number of tokens, V.
    """

    def __init__(self, hidden_size: int, vocabulary: int) -> None:
        super().__init__()
        wide = 2 * hidden_size
        self.layers = faster(nn.Sequential(nn.Linear(hidden_size, wide), nn.ReLU(), nn.Linear(wide, vocabulary)))

    def forward(self, hidden: Tensor) -> Tensor:
        """Predict Q of every token, in float32: [..., H] -> [..., V]."""
        return _in_float32(self.layers, hidden)


class ValueHead(QHead):
    """A two-layer network that predicts one value per state: hidden states [..., H] -> values [...].

    The last layer is initialised at a tenth of the usual scale: random values would be a random baseline, whose loss
    disturbs the policy's own layers before anything is learned. It is not zero, because then the first layer would get
    no gradient.

    Args:
        hidden_size: The width of the hidden states, H.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1)
        last = cast(nn.Linear, self.layers[-1])
        with torch.no_grad():
            last.weight.mul_(0.1)
            last.bias.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        """Predict the values of states, in float32: [..., H] -> [...]."""
        return super().forward(hidden).squeeze(-1)


class SummaryHead(nn.Module):
    """A linear layer that predicts one value per state: hidden states [..., H] -> values [...], as in TRL's models.

    Args:
        hidden_size: The width of the hidden states, H.
        init_strategy: "normal" draws the weights from a normal distribution; None keeps torch's own initialisation.
        initializer_range: The standard deviation of the normal distribution.
        dropout: The dropout probability of the hidden states; None: no dropout.

    Raises:
        ConfigError: If the strategy is another one.
    """

    def __init__(
        self, hidden_size: int, init_strategy: str | None, initializer_range: float, dropout: float | None
    ) -> None:
        super().__init__()
        if init_strategy not in (None, "normal"):
            raise ConfigError(f"v_head_init_strategy ({init_strategy!r}) must be 'normal' or None.")
        self.dropout = nn.Dropout(dropout or 0.0)
        self.summary = nn.Linear(hidden_size, 1)
        if init_strategy == "normal":
            nn.init.normal_(self.summary.weight, std=initializer_range)
            nn.init.zeros_(self.summary.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Predict the values of states, in float32: [..., H] -> [...]."""
        return _in_float32(self.summary, self.dropout(hidden.float())).squeeze(-1)


class ILQLHeads(nn.Module):
    """The heads of ILQL: V, one or two Q, and a slowly updated frozen target for each Q (Snell et al. 2022).

    Args:
        hidden_size: The width of the hidden states, H.
        vocabulary: The number of tokens, V.
        two_qs: Whether there are two Q heads, of which the minimum is taken.
    """

    def __init__(self, hidden_size: int, vocabulary: int, two_qs: bool = True) -> None:
        super().__init__()
        self.value = ValueHead(hidden_size)
        self.qs = nn.ModuleList([QHead(hidden_size, vocabulary) for _ in range(1 + two_qs)])
        self.targets = copy.deepcopy(self.qs).requires_grad_(False)

    def target_q(self, states: Tensor) -> Tensor:
        """Compute the minimum of the target Q heads for every token, without gradient: [N, H] -> [N, V]."""
        with torch.no_grad():
            return torch.stack([target(states) for target in self.targets]).amin(dim=0)

    def followed(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over the weights of the targets, each with the weight of the Q head that it follows."""
        yield from zip(self.targets.parameters(), self.qs.parameters(), strict=True)
