from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.unit.cli_support import ppo_file, run

TEMPLATE = (
    "{{ mood }} {% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
REWARDS = """
def found(outputs, wanted, **_):
    return [float(output.count(letter)) for output, letter in zip(outputs, wanted)]

def length(outputs, **_):
    return [float(len(output)) for output in outputs]
"""


@pytest.fixture(scope="session")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a PPO run with a chat template, a stop sequence and two reward functions; data.jsonl beside it."""
    folder = tmp_path_factory.mktemp("talking")
    file = ppo_file(folder)
    (folder / "scores.py").write_text(REWARDS)
    messages = [{"role": "user", "content": "hi"}]
    rows = [{"messages": messages, "wanted": "a"}, {"prompt": "ab", "wanted": "b"}] * 2
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = yaml.safe_load(file.read_text())
    config["tokenizer"] = {"chat_template": TEMPLATE, "chat_template_kwargs": {"mood": "calm"}}
    config["train"] |= {"seq_length": 48, "total_steps": 1, "eval_interval": 9}
    functions = [f"{folder / 'scores.py'}:{name}" for name in ("found", "length")]
    config["data"] = {"prompts": str(folder / "data.jsonl"), "reward_fn": functions, "stop_sequences": ["e"]}
    config["reward"] = {"weights": [1, -0.5]}
    file.write_text(yaml.safe_dump(config))
    result = run("train", file)
    assert result.exit_code == 0, result.output
    return folder / "run"
