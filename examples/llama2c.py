"""Convert a llama2.c checkpoint to a Hugging Face folder, complete or without the tokens it was never trained on.

A checkpoint is what llama2.c (github.com/karpathy/llama2.c, `export.py:legacy_export` and `tokenizer.py`)
writes as `model.bin` and `tokenizer.bin`, here one after the other: a header of 7 int32, the weights as
float32, then a score and the bytes of each SentencePiece piece. Only this first version of the format is
read; later ones start with a magic number.
"""

from __future__ import annotations

import copy
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import inf, prod
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

UNK, BOS, EOS = SPECIALS = ("<unk>", "<s>", "</s>")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
FIXED = len(SPECIALS) + len(BYTES)  # the first pieces are not the result of a merge
SPACE = "\u2581"  # SentencePiece writes a space as this sign
UNTRAINED_COSINE = 0.9
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass
class Llama2c:
    """Hold a checkpoint with V pieces and width H in memory."""

    config: LlamaConfig
    weights: dict[str, Tensor]  # by their names in LlamaForCausalLM
    pieces: list[str]  # [V]
    scores: list[float]  # [V], the highest is merged first

    @classmethod
    def parse(cls, data: bytes) -> Llama2c:
        """Read the bytes of model.bin followed by those of tokenizer.bin."""
        config = _parse_config(data)
        weights, size = _parse_weights(data)
        pieces, scores = _parse_pieces(data, size, config.vocab_size)
        return cls(config, weights, pieces, scores)

    def trained_only(self) -> Llama2c:
        """Remove the pieces that never occurred in training; all texts without them are treated as before.

        As an input such a piece gets no gradient, and as an output only the gradient that all wrong answers
        share. So its row of the tied embedding still points along the mean row. Specials, bytes, trained
        pieces, and the intermediate pieces of merges that lead to a trained one are kept.
        """
        embedding = self.weights[EMBEDDING]  # [V, H]
        cosine = torch.cosine_similarity(embedding, embedding.mean(0, keepdim=True))  # [V]
        scores = dict(zip(self.pieces[FIXED:], self.scores[FIXED:], strict=True))
        wanted = set(self.pieces[:FIXED])
        for piece, similarity in zip(self.pieces[FIXED:], cosine[FIXED:].tolist(), strict=True):
            if similarity < UNTRAINED_COSINE:
                wanted |= _merge_steps(piece, scores)
        kept = [index for index, piece in enumerate(self.pieces) if piece in wanted]
        config = copy.deepcopy(self.config)
        config.vocab_size = len(kept)
        weights = {**self.weights, **{name: self.weights[name][kept] for name in (EMBEDDING, HEAD)}}
        return Llama2c(config, weights, [self.pieces[i] for i in kept], [self.scores[i] for i in kept])

    def save(self, folder: Path) -> None:
        """Write the model (float32) and the tokenizer for `from_pretrained`."""
        with torch.device("meta"):
            model = LlamaForCausalLM(self.config)
        model.load_state_dict(self.weights, assign=True)
        model.tie_weights()
        model.save_pretrained(folder)
        self.tokenizer().save_pretrained(folder)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Make a SentencePiece BPE tokenizer that starts every text with `<s>`, as in training. It pads on the left."""
        ids = {piece: index for index, piece in enumerate(self.pieces)}
        bpe = models.BPE(vocab=ids, merges=self._merges(ids), unk_token=UNK, fuse_unk=True, byte_fallback=True)
        backend = Tokenizer(bpe)
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, ids[BOS])]
        )
        backend.decoder = decoders.Sequence(
            [
                decoders.Replace(SPACE, " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            unk_token=UNK,
            bos_token=BOS,
            eos_token=EOS,
            pad_token=UNK,
            padding_side="left",
        )

    def _merges(self, ids: dict[str, int]) -> list[tuple[str, str]]:
        """List all ways to join two pieces into a third, ordered by the score of the third, best first."""
        merges = []
        for piece, score in zip(self.pieces[FIXED:], self.scores[FIXED:], strict=True):
            for cut in range(1, len(piece)):
                left, right = piece[:cut], piece[cut:]
                if left in ids and right in ids:
                    merges.append((-score, ids[left], ids[right], left, right))
        return [(left, right) for *_, left, right in sorted(merges)]


def _header(data: bytes) -> tuple[int, ...]:
    """Read width, width of the MLP, layers, heads, key/value heads, +-pieces and positions."""
    return struct.unpack_from("<7i", data)


def _parse_config(data: bytes) -> LlamaConfig:
    width, hidden, layers, heads, key_heads, vocabulary, positions = _header(data)
    return LlamaConfig(
        vocab_size=abs(vocabulary),
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=vocabulary > 0,  # a negative size means that the head has weights of its own
        bos_token_id=SPECIALS.index(BOS),
        eos_token_id=SPECIALS.index(EOS),
    )


def _parse_weights(data: bytes) -> tuple[dict[str, Tensor], int]:
    """Return the weights under Hugging Face's names, and the position in `data` after them."""
    offset = struct.calcsize("<7i")

    def take(*shape: int) -> Tensor:
        nonlocal offset
        flat = torch.frombuffer(bytearray(data[offset : offset + 4 * prod(shape)]), dtype=torch.float32)
        offset += 4 * prod(shape)
        return flat.view(shape)

    width, hidden, layers, heads, key_heads, vocabulary, positions = _header(data)
    head_width = width // heads
    weights = {EMBEDDING: take(abs(vocabulary), width)}
    by_layer = {
        "input_layernorm": take(layers, width),
        "self_attn.q_proj": _split_halves(take(layers, width, width), heads),
        "self_attn.k_proj": _split_halves(take(layers, key_heads * head_width, width), key_heads),
        "self_attn.v_proj": take(layers, key_heads * head_width, width),
        "self_attn.o_proj": take(layers, width, width),
        "post_attention_layernorm": take(layers, width),
        "mlp.gate_proj": take(layers, hidden, width),
        "mlp.down_proj": take(layers, width, hidden),
        "mlp.up_proj": take(layers, hidden, width),
    }
    for name, stacked in by_layer.items():
        weights |= {f"model.layers.{layer}.{name}.weight": stacked[layer].clone() for layer in range(layers)}
    weights["model.norm.weight"] = take(width)
    take(positions, head_width)  # skip tables of rotary frequencies, which the model computes itself
    weights[HEAD] = weights[EMBEDDING] if vocabulary > 0 else take(abs(vocabulary), width)
    return weights, offset


def _split_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows within each head, [layers, heads * D, H].

    llama2.c rotates neighbours (0, 1), (2, 3), ...; Hugging Face rotates row i with row i + D / 2.
    """
    layers, rows, width = weight.shape
    pairs = weight.view(layers, heads, rows // heads // 2, 2, width)
    return pairs.transpose(2, 3).reshape(weight.shape)


def _parse_pieces(data: bytes, offset: int, count: int) -> tuple[list[str], list[float]]:
    """Read the pieces of tokenizer.bin: each is a float32 score, an int32 length and its bytes."""
    offset += 4  # skip the length of the longest piece
    pieces, scores = [*SPECIALS, *BYTES], []
    for index in range(count):
        score, length = struct.unpack_from("<fi", data, offset)
        offset += 8
        scores.append(score)
        if index >= FIXED:
            pieces.append(data[offset : offset + length].decode().replace(" ", SPACE))
        offset += length
    return pieces, scores


def _merge_steps(piece: str, scores: dict[str, float]) -> set[str]:
    """Return `piece` and all intermediate pieces while merging builds it from characters."""
    parts, seen = list(piece), {piece, *piece}
    while len(parts) > 1:
        best, at = max((scores.get(a + b, -inf), -i) for i, (a, b) in enumerate(pairwise(parts)))
        if best == -inf:
            break
        parts[-at : 2 - at] = [parts[-at] + parts[1 - at]]
        seen.add(parts[-at])
    return seen
