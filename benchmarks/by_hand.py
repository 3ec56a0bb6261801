"""Time passes of GPT-2 written out by hand: how much trainers could gain from less Python, modules and autograd.

    python -m benchmarks.by_hand --write
    python -m benchmarks.by_hand --size 124M --repeats 8 --write

One side is what trainers run: the modules of transformers, with `faster`, and autograd, and for decoding steps that are
replayed (`PYTORCH_JIT=0` lets the modules compute those too). The other one calls the same kernels of torch for the
same rows, with every gradient written out, and computes the same up to rounding. Weights are random, in float32. Rows
have the lengths of `side_by_side`: 46 tokens of SFT; a prompt of 16 with two answers of 30, here one row of 76, for DPO
and reward models; and 16 + 48 tokens for PPO and decoding. Optimizer steps are on neither side. In CPU milliseconds of
one thread, the median of turns and of their quotients. `--write` puts the rows into docs/speed.md.

One row has the feed-forward networks alone by hand, which could take the place of a family's own, and all else by
modules.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from benchmarks.limits import generate
from benchmarks.ppo import tokenizer
from benchmarks.side_by_side import PAGE, PROMPT, SHAPES, put_row, save_model
from trlx_like import ModelConfig
from trlx_like.distributed.setup import keep_freed_memory
from trlx_like.functional.logprobs import score_tokens
from trlx_like.models.faster import gelu_and_slope
from trlx_like.models.last_states import Reading, last_states
from trlx_like.models.layout import lm_head
from trlx_like.models.loading import load_model
from trlx_like.samplers.engines import TransformersEngine

KERNELS = torch.ops.aten
DECODED = 48


class Kept(NamedTuple):
    """What a block keeps for its gradient. Rows of all tokens are [N, *]; those of attention [B, heads, T, *]."""

    entered: Tensor
    first: tuple[Tensor, Tensor, Tensor]
    attended: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    rows: Tensor
    middle: Tensor
    second: tuple[Tensor, Tensor, Tensor]
    slope: Tensor
    active: Tensor


class ByHand:
    """GPT-2 with a forward and a backward pass written out, in float32 and without dropout.

    Args:
        lm: The model, whose weights are read and get gradients.
    """

    def __init__(self, lm: Any) -> None:
        self.blocks, self.last = list(lm.transformer.h), lm.transformer.ln_f
        self.words, self.places = lm.transformer.wte.weight, lm.transformer.wpe.weight
        self.heads, self.width = lm.config.n_head, lm.config.n_embd

    @torch.no_grad()
    def forward(
        self, ids: Tensor, seen: slice, learn: bool = True
    ) -> tuple[list[Kept], Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Read rows of ids [B, T], to learn or not.

        Return what blocks keep, and the last states of the tokens that are seen, as they are and normalised. [S, H]
        """
        states = functional.embedding(ids, self.words).add_(self.places[: ids.shape[1]]).view(-1, self.width)
        kept = []
        for block in self.blocks:
            made = self._block(block, states, ids.shape, learn, seen if block is self.blocks[-1] else slice(None))
            kept.append(made)
            states = _added(made.middle, made.active, block.mlp.c_proj)
        return kept, states, _norm(self.last, states)

    def _block(self, block: Any, states: Tensor, shape: torch.Size, learn: bool, seen: slice) -> Kept:
        first = _norm(block.ln_1, states)
        parts = torch.addmm(block.attn.c_attn.bias, first[0], block.attn.c_attn.weight).view(*shape, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed, total = KERNELS._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)
        rows = mixed.transpose(1, 2).reshape(-1, self.width)
        middle = _added(states, rows, block.attn.c_proj).view(*shape, -1)[:, seen].reshape(-1, self.width)
        second = _norm(block.ln_2, middle)
        inner = torch.addmm(block.mlp.c_fc.bias, second[0], block.mlp.c_fc.weight)
        mixing = query, key, value, mixed, total
        if not learn:
            return Kept(states, first, mixing, rows, middle, second, inner, block.mlp.act(inner))
        active, slope = gelu_and_slope(inner)
        return Kept(states, first, mixing, rows, middle, second, slope, active)

    @torch.no_grad()
    def learn(self, ids: Tensor, learned: int) -> None:
        """Set the gradients of the mean of -log p of the last `learned` tokens of each row."""
        seen = slice(-learned - 1, -1)
        kept, states, last = self.forward(ids, seen)
        read = last[0]
        targets = ids[:, -learned:].reshape(-1, 1)
        grad = torch.softmax(read @ self.words.t(), -1).div_(len(targets))
        grad.scatter_add_(1, targets, grad.new_full(targets.shape, -1 / len(targets)))
        self._back(kept, states, last, grad @ self.words, ids, grad.t() @ read, seen)

    @torch.no_grad()
    def score(self, ids: Tensor, learned: int) -> Tensor:
        """Return log p of the last `learned` tokens of each row. [B * learned]"""
        _, _, last = self.forward(ids, slice(-learned - 1, -1), learn=False)
        logits = last[0] @ self.words.t()
        made: Tensor = logits.gather(1, ids[:, -learned:].reshape(-1, 1))[:, 0] - logits.logsumexp(-1)
        return made

    @torch.no_grad()
    def rank(self, ids: Tensor, head: Tensor) -> None:
        """Set the gradients of the mean of states at the last token times a head [1, H], and that of the head."""
        seen = slice(-1, None)
        kept, states, last = self.forward(ids, seen)
        head.grad = last[0].mean(0, keepdim=True)
        grad = (head / len(ids)).expand_as(last[0]).contiguous()
        self._back(kept, states, last, grad, ids, torch.zeros_like(self.words), seen)

    def _back(
        self, kept: list[Kept], states: Tensor, last: Any, grad: Tensor, ids: Tensor, of_words: Tensor, seen: slice
    ) -> None:
        grad = _back_norm(self.last, states, last, grad)
        for block, made in zip(self.blocks[::-1], kept[::-1], strict=True):
            inner = _back_linear(block.mlp.c_proj, made.active, grad).mul_(made.slope)
            inner = _back_linear(block.mlp.c_fc, made.second[0], inner)
            grad = _back_norm(block.ln_2, made.middle, made.second, inner).add_(grad)
            if block is self.blocks[-1]:
                of_seen, grad = grad, grad.new_zeros(*ids.shape, self.width)
                grad[:, seen] = of_seen.view(len(ids), -1, self.width)
                grad = grad.view(-1, self.width)
            mixed = _back_linear(block.attn.c_proj, made.rows, grad).view(*ids.shape, self.heads, -1).transpose(1, 2)
            three = KERNELS._scaled_dot_product_flash_attention_for_cpu_backward(mixed, *made.attended, 0.0, True)
            parts = torch.stack([part.transpose(1, 2) for part in three], 2).view(-1, 3 * self.width)
            parts = _back_linear(block.attn.c_attn, made.first[0], parts)
            grad = _back_norm(block.ln_1, made.entered, made.first, parts).add_(grad)
        self.places.grad = torch.zeros_like(self.places)
        self.places.grad[: ids.shape[1]] = grad.view(*ids.shape, -1).sum(0)
        self.words.grad = of_words.index_add_(0, ids.view(-1), grad)

    @torch.no_grad()
    def decode(self, ids: Tensor, tokens: int) -> Tensor:
        """Draw tokens after rows of ids [B, T], without a seed for each row. [B, tokens]"""
        kept, _, last = self.forward(ids, slice(-1, None), learn=False)
        places = torch.empty(len(self.blocks), 2, len(ids), self.heads, ids.shape[1] + tokens, self.width // self.heads)
        for held, block in zip(places, kept, strict=True):
            held[0, :, :, : ids.shape[1]], held[1, :, :, : ids.shape[1]] = block.attended[1:3]
        logits, drawn = last[0] @ self.words.t(), []
        for place in range(ids.shape[1], ids.shape[1] + tokens):
            drawn.append(logits.softmax(-1).multinomial(1).squeeze(1))
            if len(drawn) < tokens:
                logits = self.token(drawn[-1], place, places)
        return torch.stack(drawn, 1)

    @torch.no_grad()
    def token(self, ids: Tensor, place: int, kept: Tensor) -> Tensor:
        """Read a new token of each row. Return logits [B, V].

        Args:
            ids: The tokens. [B]
            place: How many tokens are before them.
            kept: Keys and values of these, to which those of the new tokens are added. [blocks, 2, B, heads, T, *]
        """
        states = functional.embedding(ids, self.words).add_(self.places[place])
        for block, (key, value) in zip(self.blocks, kept, strict=True):
            parts = torch.addmm(block.attn.c_attn.bias, _norm(block.ln_1, states)[0], block.attn.c_attn.weight)
            query, key[:, :, place], value[:, :, place] = parts.view(len(ids), 3, self.heads, -1).unbind(1)
            scores = (query[:, :, None] @ key[:, :, : place + 1].transpose(2, 3)).div_(query.shape[-1] ** 0.5)
            mixed = (scores.softmax(-1) @ value[:, :, : place + 1]).view(len(ids), -1)
            states = _added(states, mixed, block.attn.c_proj)
            inner = torch.addmm(block.mlp.c_fc.bias, _norm(block.ln_2, states)[0], block.mlp.c_fc.weight)
            states = _added(states, block.mlp.act(inner), block.mlp.c_proj)
        logits: Tensor = _norm(self.last, states)[0] @ self.words.t()
        return logits


def _norm(norm: nn.LayerNorm, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return normalised states [N, H], and their means and the inverses of their deviations."""
    made: tuple[Tensor, Tensor, Tensor]
    made = KERNELS.native_layer_norm(states, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    return made


def _back_norm(norm: nn.LayerNorm, states: Tensor, made: tuple[Tensor, Tensor, Tensor], grad: Tensor) -> Tensor:
    """Set the gradients of a norm, given what it read and returned; return that of what it read. [N, H]"""
    of_states: Tensor
    of_states, norm.weight.grad, norm.bias.grad = KERNELS.native_layer_norm_backward(
        grad, states, norm.normalized_shape, *made[1:], norm.weight, norm.bias, [True] * 3
    )
    return of_states


def _added(states: Tensor, rows: Tensor, linear: Any) -> Tensor:
    """Return states plus the result of a linear layer. [N, H]"""
    return states.addmm(rows, linear.weight).add_(linear.bias)


def _back_linear(linear: Any, rows: Tensor, grad: Tensor) -> Tensor:
    """Set the gradients of a linear layer, given what it read; return that of what it read. [N, in]"""
    linear.weight.grad, linear.bias.grad = rows.t() @ grad, grad.sum(0)
    of_rows: Tensor = grad @ linear.weight.t()
    return of_rows


def read(lm: Any, ids: Tensor, seen: slice) -> Tensor:
    """Return the last hidden states of the tokens that are seen, as trainers compute them. [B, S, H]"""
    places = torch.arange(ids.numel()).view(ids.shape)[:, seen].flatten()
    states: Tensor = last_states(lm, Reading({"input_ids": ids}, places=places))[:, seen]
    return states


def score_by_modules(lm: Any, ids: Tensor, learned: int) -> Tensor:
    """Do what `ByHand.score` does with modules."""
    states = read(lm, ids, slice(-learned - 1, -1))
    rows, targets = states.reshape(-1, states.shape[-1]), ids[:, -learned:].reshape(-1)
    return score_tokens(rows, targets, lm_head(lm)).logprobs


def by_modules(lm: Any, ids: Tensor, learned: int) -> None:
    """Do what `ByHand.learn` does with modules and autograd."""
    score_by_modules(lm, ids, learned).mean().neg().backward()


def rank_by_modules(lm: Any, ids: Tensor, head: Tensor) -> None:
    """Do what `ByHand.rank` does with modules and autograd."""
    functional.linear(read(lm, ids, slice(-1, None))[:, -1], head).mean().backward()


class FeedForward(torch.autograd.Function):
    """The feed-forward network of a block, with its gradient written out."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
        """Return the results for rows [N, H]; weights are [in, out]."""
        active, slope = gelu_and_slope(torch.addmm(up_bias, rows, up))
        ctx.save_for_backward(rows, up, down, active, slope)
        return torch.addmm(down_bias, active, down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of all inputs."""
        rows, up, down, active, slope = ctx.saved_tensors
        inner = (grad @ down.t()).mul_(slope)
        return inner @ up.t(), rows.t() @ inner, inner.sum(0), active.t() @ grad, grad.sum(0)


def networks_by_hand(lm: Any, ids: Tensor, learned: int) -> None:
    """Do what `by_modules` does, but with `FeedForward` as the network of each block."""

    def forward(network: Any, states: Tensor) -> Tensor:
        up, down = network.c_fc, network.c_proj
        made = FeedForward.apply(states.view(-1, states.shape[-1]), up.weight, up.bias, down.weight, down.bias)  # type: ignore[no-untyped-call]
        return cast(Tensor, made.view(states.shape))

    with patch.object(type(lm.transformer.h[0].mlp), "forward", forward):
        by_modules(lm, ids, learned)


def passes(lm: Any, size: str) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return what is compared, by name: the modules' side and the one by hand."""
    hand, engine = ByHand(lm), TransformersEngine(lm, tokenizer(lm.config.vocab_size))
    words, shape = lm.config.vocab_size - 1, SHAPES["dpo"][size]
    learned, batch = shape["response"], shape["batch"]
    one, two = (torch.randint(words, (batch, PROMPT + answers * learned)) for answers in (1, 2))
    head, seen = nn.Parameter(torch.randn(1, hand.width)), slice(-2 * learned - 1, -1)

    def reference() -> None:
        with torch.no_grad():
            read(lm, two, seen)

    def decoding(rows: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        prompts = torch.randint(words, (rows, PROMPT))
        return lambda: generate(engine, prompts, DECODED), lambda: hand.decode(prompts, DECODED)

    def learning(ids: Tensor, learned: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        return lambda: by_modules(lm, ids, learned), lambda: hand.learn(ids, learned)

    def scoring(ids: Tensor, learned: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        return torch.no_grad()(lambda: score_by_modules(lm, ids, learned)), lambda: hand.score(ids, learned)

    both = {"DPO: forward and backward": learning(two, 2 * learned)}
    if size == "124M":
        online = SHAPES["ppo"][size]
        drawn = torch.randint(words, (online["prompts_a_lap"], PROMPT + online["response"]))
        return {
            "PPO: forward and backward, 4 rows": learning(drawn[: online["batch"]], online["response"]),
            "PPO: scores of 8 rows": scoring(drawn, online["response"]),
            **both,
            "DPO: scores of the reference": scoring(two, 2 * learned),
            "decoding, 8 rows": decoding(8),
        }
    return {
        "SFT: forward and backward": learning(one, learned),
        "SFT: forward and backward, feed-forward networks alone by hand": (
            lambda: by_modules(lm, one, learned),
            lambda: networks_by_hand(lm, one, learned),
        ),
        **both,
        "DPO: the reference, without its head": (reference, lambda: hand.forward(two, seen, learn=False)),
        "reward model: forward and backward": (lambda: rank_by_modules(lm, two, head), lambda: hand.rank(two, head)),
        **{f"decoding, {rows} row{'s'[: rows - 1]}": decoding(rows) for rows in (1, 8, 32, 128)},
    }


def milliseconds(run: Callable[[], Any]) -> float:
    """Return the CPU milliseconds of a call."""
    begun = time.process_time()
    run()
    return 1e3 * (time.process_time() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare passes of GPT-2 with passes by hand.")
    parser.add_argument("--size", choices=["1.8M", "124M"], default="1.8M", help="weights of the model (default 1.8M)")
    parser.add_argument("--repeats", type=int, default=40, help="turns (default 40)")
    parser.add_argument("--write", action="store_true", help="put the rows into docs/speed.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        save_model(given.size, Path(folder))
        lm = load_model(folder, ModelConfig(model_path=folder))
        text = PAGE.read_text(encoding="utf-8")
        for name, sides in passes(lm, given.size).items():
            lm.train(not name.startswith("decoding"))
            turns = list[list[float]]()
            for _ in range(given.repeats + 2):
                turns.append([])
                for side in sides:
                    turns[-1].append(milliseconds(side))
                    lm.zero_grad(set_to_none=True)
            modules, by_hand = (statistics.median(taken) for taken in zip(*turns[2:], strict=True))
            part = statistics.median(hand / module for module, hand in turns[2:])  # what else the machine does varies
            row = f"| {name} | {modules:.1f} | {by_hand:.1f} | {part:.2f} |"
            print(row)
            text = put_row(text, f"a pass of {given.size} weights", row)
        if given.write:
            PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
