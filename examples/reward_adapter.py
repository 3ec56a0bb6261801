"""One model as policy, reference, value function and reward model: two adapters and two heads on one frozen base.

    python examples/reward_adapter.py [--rounds 12] [--directory runs/reward_adapter]

A reward model learns, from pairs of words, that vowels are better, and is saved as an adapter. PPO then trains another
adapter on the same base. Each round it samples with that adapter, scores with the reward adapter, and compares with the
base alone. So the large weights are in memory once, whereas PPO usually needs up to four models. In TRL this was
`AutoModelForCausalLMWithValueHead.from_pretrained(..., reward_adapter=...)`.

The base has random weights here, so that the program runs in seconds on a CPU; put a pretrained model in its place.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it runs from any folder

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast

from trlx_like import AutoModelForCausalLMWithValueHead, TRLConfig
from trlx_like.trainers.ppo import PPOTrainer
from trlx_like.trainers.reward import RewardTrainer

LETTERS, VOWELS = "abcdefghij", "aei"
ADAPTER = {"peft_type": "LORA", "r": 8, "target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}


def save_base(folder: Path) -> None:
    """Save a small GPT-2 with random weights and a tokenizer with one token per letter."""
    tokens = ["<pad>", "<eos>", " ", *LETTERS]
    made = Tokenizer(models.WordLevel({token: row for row, token in enumerate(tokens)}, unk_token=" "))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 24, "initializer_range": 0.3}
    config = GPT2Config(vocab_size=len(tokens), bos_token_id=1, eos_token_id=1, pad_token_id=0, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def word(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(2, 6)))


def vowels(text: str) -> int:
    return sum(letter in VOWELS for letter in text)


def preferences(count: int, rng: random.Random) -> list[dict[str, str]]:
    """Make pairs of words, of which the one with more vowels is preferred."""
    rows: list[dict[str, str]] = []
    while len(rows) < count:
        worse, better = sorted([word(rng), word(rng)], key=vowels)
        if vowels(worse) < vowels(better):
            rows.append({"prompt": f"{word(rng)} ", "chosen": better, "rejected": worse})
    return rows


def configuration(algorithm: str, base: Path, folder: Path, method: dict[str, Any], steps: int) -> TRLConfig:
    """Make a configuration that trains an adapter on the base."""
    train = {"seq_length": 16, "batch_size": 64, "epochs": 100, "eval_interval": steps, "total_steps": steps}
    return TRLConfig.from_dict(
        {
            "method": {"name": f"{algorithm}Config", **method},
            "model": {"model_path": str(base), "peft_config": ADAPTER},
            "optimizer": {"name": "adamw", "kwargs": {"lr": 5e-3}},
            "train": {**train, "trainer": f"{algorithm}Trainer", "checkpoint_dir": str(folder), "tracker": None},
        }
    )


def train_reward_adapter(base: Path, folder: Path) -> float:
    """Train a reward model and save its adapter and head; return its accuracy on held-out pairs."""
    rng = random.Random(0)
    config = configuration("Reward", base, folder / "run", {}, steps=120)
    trainer = RewardTrainer(config, preferences=preferences(1000, rng), eval_preferences=preferences(200, rng))
    trainer.learn()
    trainer.save_pretrained(folder / "adapter", merged=False)
    with torch.no_grad():
        return float(trainer.evaluate()["eval/rewards/accuracies"])


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Pad rows of token ids on the right. Returns ids and attention mask, both [B, T]."""
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


def train_policy(base: Path, reward_adapter: Path, folder: Path, rounds: int) -> list[tuple[float, float]]:
    """Train the policy by PPO; return mean reward and mean number of vowels of each round."""
    method = {"gen_kwargs": {"max_new_tokens": 6}, "init_kl_coef": 0.02}
    trainer = PPOTrainer(
        configuration("PPO", base, folder, method, steps=8 * rounds)
    )  # 4 passes over 2 batches a round
    model = AutoModelForCausalLMWithValueHead(trainer.model.lm)
    model.add_and_load_reward_modeling_adapter(reward_adapter)
    rng, history = random.Random(1), []
    for _ in range(rounds):
        queries = [trainer.tokenizer(f"{word(rng)} ", return_tensors="pt").input_ids[0] for _ in range(128)]
        responses = [response.cpu() for response in trainer.generate(queries)]
        ids, mask = padded([torch.cat(pair) for pair in zip(queries, responses, strict=True)])
        scores = model.compute_reward_score(ids.to(trainer.device), mask.to(trainer.device))[:, -1, 0].tolist()
        trainer.step(queries, responses, scores)
        texts = trainer.tokenizer.batch_decode(responses, skip_special_tokens=True)
        history.append((sum(scores) / len(scores), sum(map(vowels, texts)) / len(texts)))
    return history


def main(arguments: list[str] | None = None) -> tuple[float, list[tuple[float, float]]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12, help="rounds of PPO (default 12)")
    parser.add_argument("--directory", type=Path, help="where models are saved (default: a temporary folder)")
    given = parser.parse_args(arguments)
    started = time.process_time()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.directory or Path(temporary)
        save_base(folder / "base")
        accuracy = train_reward_adapter(folder / "base", folder / "reward")
        print(f"reward adapter: {accuracy:.2f} of held-out pairs in the right order")
        history = train_policy(folder / "base", folder / "reward" / "adapter", folder / "policy", given.rounds)
    for number, (reward, count) in enumerate(history):
        print(f"round {number:2}: mean reward {reward:6.2f}, vowels per word {count:.2f}")
    print(f"{time.process_time() - started:.0f} CPU seconds")
    return accuracy, history


if __name__ == "__main__":
    main()
