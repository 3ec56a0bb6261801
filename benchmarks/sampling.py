"""Measure sampling in process beside `generate()` of transformers: CPU seconds, alternating, the least of each.

    python -m benchmarks.sampling [--layers 6 --width 144 --vocabulary 24] [--repeats 5] [--json out.json]

The model is a GPT-2 with random weights, of the size of the randomwalks example. Where lengths vary, each token ends a
response with a probability of about 1 / vocabulary.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config

from benchmarks.measure import arguments, show
from benchmarks.ppo import tokenizer
from trlx_like.pipelines.prompts import PromptPipeline
from trlx_like.samplers.engines import TransformersEngine
from trlx_like.samplers.text import TextSampler

# What is sampled: prompts, responses to each, tokens of a prompt and of a response, whether lengths vary, batch size.
CASES: dict[str, tuple[int, int, int, int, bool, int | None]] = {
    "1 prompt, 64 tokens": (1, 1, 16, 64, False, None),
    "32 prompts, 64 tokens": (32, 1, 16, 64, False, None),
    "128 prompts, 64 tokens": (128, 1, 16, 64, False, None),
    "64 prompts, up to 64 tokens": (64, 1, 16, 64, True, None),
    "128 prompts, up to 64 tokens, 32 at a time": (128, 1, 16, 64, True, 32),
    "4 prompts of 256 tokens, 8 responses each, 48 tokens": (4, 8, 256, 48, False, None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 6), ("width", 144), ("vocabulary", 24), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    given = arguments(parser)
    torch.manual_seed(0)
    eos = given.vocabulary - 1
    sizes: Any = {
        "vocab_size": given.vocabulary,
        "bos_token_id": eos,
        "eos_token_id": eos,
        "n_layer": given.layers,
        "n_embd": given.width,
    }
    config = GPT2Config(n_head=max(1, given.width // 24), n_positions=512, **sizes)
    lm, words = AutoModelForCausalLM.from_config(config).eval(), tokenizer(given.vocabulary)
    rng = random.Random(0)
    results: dict[str, Any] = {}
    for case, (prompts, responses, before, longest, vary, at_once) in CASES.items():
        texts = [" ".join(str(rng.randrange(given.vocabulary - 1)) for _ in range(before)) for _ in range(prompts)]
        batch = PromptPipeline([text for text in texts for _ in range(responses)], before, words)
        sampler = TextSampler(TransformersEngine(lm, words), words, batch_size=at_once)
        options = {"max_new_tokens": longest, "eos_token_id": eos if vary else None}
        ways: dict[str, dict[str, Any]] = {"own": options, "generate": {**options, "cache_implementation": "dynamic"}}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        tokens = 0
        for _ in range(given.repeats):
            for way, chosen in ways.items():
                begun = time.process_time()
                made = sampler.sample(batch[range(len(batch))], chosen, 1)
                seconds[way].append(time.process_time() - begun)
                tokens = int(made.completion.mask.sum())
        own, theirs = (min(column) for column in seconds.values())
        rounded = {"generate": round(theirs, 3), "own": round(own, 3), "times": round(theirs / own, 2)}
        results[case] = rounded | {"tokens_per_second": round(tokens / own)}
    show(results, given.json)


if __name__ == "__main__":
    main()
