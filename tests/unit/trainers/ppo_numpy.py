"""PPO once more, in float64 numpy, a token at a time and without padding: what the trainer's numbers must be."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class Seen:
    """What a model thinks of the R tokens of one response."""

    probabilities: Array  # [R, V] of every token, under the temperature
    logprobs: Array  # [R] of the tokens that were taken
    values: Array | None = None  # [R] of the states before them

    @property
    def entropy(self) -> Array:
        return np.array([-sum(p * np.log(p) for p in row if p > 0) for row in self.probabilities])


def see(lm: Any, prompt: list[int], response: list[int], temperature: float, value_head: Any = None) -> Seen:
    """Runs a plain Hugging Face model in float64 on one unpadded row."""
    twin = copy.deepcopy(lm).double().eval()
    with torch.no_grad():
        out = twin(input_ids=torch.tensor([prompt + response]), output_hidden_states=True)
    # The state that predicts token t of the response is the one at position P - 1 + t.
    states = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
    logits = out.logits[0, states].numpy() / temperature
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = powers / powers.sum(axis=1, keepdims=True)
    logprobs = np.log([row[token] for row, token in zip(probabilities, response, strict=True)])
    if value_head is None:
        return Seen(probabilities, logprobs)
    weights = {name: weight.detach().double().numpy() for name, weight in value_head.state_dict().items()}
    hidden = out.hidden_states[-1][0, states].numpy()
    inner = np.maximum(hidden @ weights["layers.0.weight"].T + weights["layers.0.bias"], 0)
    return Seen(probabilities, logprobs, (inner @ weights["layers.2.weight"].T + weights["layers.2.bias"])[:, 0])


def penalty(policy: Seen, reference: Seen, kind: str) -> Array:
    """KL to the reference of each token, as `method.kl_penalty` names it (and k3)."""
    if kind == "full":
        return np.array(
            [
                sum(p * (np.log(p) - np.log(q)) for p, q in zip(row, other, strict=True))
                for row, other in zip(policy.probabilities, reference.probabilities, strict=True)
            ]
        )
    d = policy.logprobs - reference.logprobs
    return {"kl": d, "abs": np.abs(d), "mse": d**2 / 2, "k3": np.exp(-d) - 1 + d}[kind]


def token_losses(policy: Seen, old: Mapping[str, Array], method: Any, coefficient: float, kl: Array) -> Array:
    """The loss of each token: policy, value, entropy and KL. old: old_logprobs, old_values, advantages, returns."""
    assert policy.values is not None
    losses = []
    for t, advantage in enumerate(old["advantages"]):
        ratio = np.exp(policy.logprobs[t] - old["old_logprobs"][t])
        clipped = min(max(ratio, 1 - method.cliprange), 1 + method.cliprange)
        surrogate = min(advantage * ratio, advantage * clipped)
        value, target = policy.values[t], old["returns"][t]
        error = (value - target) ** 2
        if method.cliprange_value is not None:
            low, high = (old["old_values"][t] + side * method.cliprange_value for side in (-1, 1))
            error = max(error, (min(max(value, low), high) - target) ** 2)
        loss = -surrogate + method.vf_coef * error / 2 - method.ent_coef * policy.entropy[t]
        losses.append(loss + (coefficient * kl[t] if method.kl_in == "loss" else 0))
    return np.array(losses)
