"""Sampling with `generate()` of transformers, in the environment of this project."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.peers.laps import Laps


def main() -> None:
    laps = Laps()
    model: Any = AutoModelForCausalLM.from_pretrained(laps.task["model"])
    model.to(laps.device)
    words = AutoTokenizer.from_pretrained(laps.task["model"], padding_side="left")
    while True:
        for case in laps.in_turns():
            prompts = [text for text in case["prompts"] for _ in range(case["group"])]
            ids = words(prompts, return_tensors="pt").to(laps.device)
            laps.next()
            for rows, mask in zip(
                *(ids[name].split(case["at_once"]) for name in ("input_ids", "attention_mask")), strict=True
            ):
                with torch.no_grad():
                    model.generate(
                        rows,
                        attention_mask=mask,
                        do_sample=True,
                        top_k=0,
                        max_new_tokens=case["response"],
                        eos_token_id=case["eos"],
                        pad_token_id=words.pad_token_id,
                    )


if __name__ == "__main__":
    main()
