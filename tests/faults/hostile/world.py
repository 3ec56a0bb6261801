"""The files that hostile cases are made of: small working runs of every trainer, and what is changed in them."""

from __future__ import annotations

import copy
import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForSequenceClassification, BertConfig, BertForMaskedLM

from tests.tiny import save_tiny, tiny_config, tiny_lm, tiny_tokenizer
from tests.tiny_pipelines import saved

HERE = Path(__file__).parent
FUNCTIONS = """\
import torch

NUMBER = 3

def score(outputs, **_):
    return [float(len(output)) for output in outputs]

def rate(images, **_):
    return [float(number) for number, _ in enumerate(images)]

def fails(**_):
    raise KeyError("no such thing")

def text():
    return "text"

def none():
    return None

def surrogates():
    return ["\\ud800"]

def small_mask():
    return torch.ones(2, 2, dtype=torch.bool)
"""
FILES: dict[str, str | bytes] = {
    "functions.py": FUNCTIONS,
    "broken.py": "1 / 0\n",
    "syntax.py": "def f(:\n",
    "prompts.txt": "ab\nthe cats\n",
    "samples.jsonl": '["ab", " cd"]\n["the cat", " sat."]\n',
    "rewards.jsonl": "1\n-0.5\n",
    "pairs.jsonl": '{"prompt": "ab", "chosen": " cd", "rejected": "e"}\n["the cat", " sat.", " flew"]\n',
    "garbage.png": b"\x89PNG\r\n\x1a\n\x00\xff",
}


def letters(*names: str) -> str:
    """A bomb: each line is a list of the line before it, nine times."""
    rows = [f"{names[0]}: &{names[0]} [x, x, x, x, x, x, x, x, x]"]
    rows += [
        f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in zip(names[:-1], names[1:], strict=True)
    ]
    return "\n".join(rows) + "\n"


def nested(line: str, names: str) -> str:
    """Lines that each stand for the line before them several times."""
    rows = [f"{names[0]}: &{names[0]} {{x: 1}}"]
    rows += [f"{name}: &{name} {line.replace('@', before)}" for before, name in zip(names, names[1:], strict=False)]
    return "\n".join(rows) + "\n"


@functools.cache
def texts() -> dict[str, str]:
    """Contents that are too long or too odd for a table, by the word that stands for them there."""
    return {
        "DIGITS": "train: {seed: " + "9" * 5000 + "}\n",
        "BOMB": letters(*"abcdefghi"),
        "MAPS": nested("{k1: *@, k2: *@, k3: *@, k4: *@}", "abcdefghijklm"),
        "MERGES": nested("{k1: {<<: *@}, k2: {<<: [*@, *@]}, k3: *@}", "abcdefghijklm"),
        "VALUES": "train: [" + "1," * 25_000 + "]\n",
        "MEGABYTE": "train: " + "x" * 1_000_000,
        "HUNDRED": "train: " + "x" * 100_000_000,
        "BRACKETS": "train: " + "[" * 2000,
        "MAPPINGS": "\n".join(" " * depth + "a:" for depth in range(100)),
        "DASHES": "- " * 2000,
        "QUESTIONS": "? " * 2000,
    }


@functools.cache
def contents() -> dict[str, str]:
    """The same for data files."""
    return {
        "DIGITS": "[" + "9" * 5000 + "]",
        "NESTED": "[" * 100_000 + "]" * 100_000,
        "LONG": '"' + "x" * 20_000_000 + '"\n',
        "WIDE": "prompt,output\na," + "x" * 11_000_000 + "\n",
    }


def build(folder: Path) -> None:
    """Write everything that cases share into a folder, and `good.yml`, a run that works."""
    for name, text in FILES.items():
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    save_tiny(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "t5")
    tiny_lm("t5").save_pretrained(folder / "t5")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    bert = BertForMaskedLM(BertConfig(vocab_size=32, max_position_embeddings=64, **sizes))
    classifier = AutoModelForSequenceClassification.from_config(tiny_config("gpt_neox"), torch_dtype=torch.float32)
    for name, model in (("bert", bert), ("classifier", classifier)):
        model.save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    shutil.copytree(folder / "model", folder / "weights_only", ignore=shutil.ignore_patterns("tokenizer*"))
    shutil.copytree(folder / "model", folder / "cut_off")
    cut(folder / "cut_off" / "model.safetensors", 4000)
    shutil.copytree(saved("sd"), folder / "pipeline")
    (folder / "adapter").mkdir()
    adapter = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "target_modules": ["c_attn"]}
    (folder / "adapter" / "adapter_config.json").write_text(
        json.dumps({**adapter, "base_model_name_or_path": str(folder / "model")})
    )
    shutil.copy(folder / "model" / "model.safetensors", folder / "adapter" / "adapter_model.safetensors")
    tiny_tokenizer().save_pretrained(folder / "adapter")
    for name in ("pipe.txt", "pipe.jsonl", "pipe.parquet"):
        os.mkfifo(folder / name)
    (folder / "device.txt").symlink_to("/dev/zero")
    for name in ("empty", "folder.jsonl", "broken_run", "damaged/checkpoint_1"):
        (folder / name).mkdir(parents=True)
    (folder / "broken_run" / "metrics.jsonl").write_text('{"step": 1, "x": \n{"step"')
    (folder / "damaged" / "checkpoint_1" / "manifest.json").write_text("{")
    _write_parquet(folder)
    write_config(folder / "good.yml", base("SFTTrainer"))


def _write_parquet(folder: Path) -> None:
    from pyarrow import Table, parquet

    parquet.write_table(Table.from_pylist([{"words": "a", "answer": "b"}]), folder / "wrong.parquet")
    shutil.copy(folder / "wrong.parquet", folder / "cut.parquet")
    cut(folder / "cut.parquet", 200)


@functools.cache
def table(name: str) -> dict[str, Any]:
    """A table of cases, or the one of bases."""
    found: dict[str, Any] = yaml.safe_load((HERE / f"{name}.yml").read_text(encoding="utf-8"))
    return found


def base(trainer: str) -> dict[str, Any]:
    """The configuration of a trainer's working run."""
    tables = table("bases")
    values: dict[str, Any] = {**copy.deepcopy(tables["common"]), **copy.deepcopy(tables["trainers"][trainer])}
    values["train"]["trainer"] = trainer
    return values


def changed(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The values with changes by dotted key put over them, the last part of `optimizer.kwargs.lr` included."""
    for key, value in changes.items():
        *path, last = key.split(".")
        at = values
        for name in path:
            at = at.setdefault(name, {})
        if value == "absent":
            del at[last]
        else:
            at[last] = value
    return values


def write_config(file: Path, values: dict[str, Any]) -> None:
    file.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def write_data(folder: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        elif isinstance(content, str):
            content = contents().get(content, content)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def cut(file: Path, count: int) -> None:
    file.write_bytes(file.read_bytes()[:count])


def write_model(folder: Path, source: Path, changes: dict[str, Any]) -> None:
    """A copy of a model's folder with its files changed."""
    shutil.copytree(source, folder)
    for name, change in changes.items():
        file = folder / name
        if not isinstance(change, dict):
            _write_part(file, change)
        elif "cut" in change:
            cut(file, change["cut"])
        elif "append" in change:
            file.write_bytes(file.read_bytes() + change["append"].encode())
        elif "json" in change:
            file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **change["json"]}))
        elif "rename" in change:
            file.rename(folder / change["rename"])
        elif file.is_dir():
            shutil.rmtree(file)
        else:
            file.unlink()
        if isinstance(change, dict) and "pipe" in change:
            os.mkfifo(file)
        if isinstance(change, dict) and "folder" in change:
            file.mkdir()


def _write_part(file: Path, change: Any) -> None:
    """Write a file of a model's folder: what is given, or what a word stands for."""
    if change == "NAN":
        lm = tiny_lm()
        with torch.no_grad():
            lm.get_parameter("transformer.h.1.mlp.c_fc.weight")[0, 0] = float("nan")
        lm.save_pretrained(file.parent)
    elif change in ("LARGER", "MORE"):
        tokens = json.loads(file.read_text(encoding="utf-8"))
        vocabulary = tokens["model"]["vocab"]
        more = ["<end of everything>"] if change == "MORE" else [f"word{number}" for number in range(20)]
        vocabulary |= {token: 40 + number for number, token in enumerate(more)}
        file.write_text(json.dumps(tokens))
    else:
        file.write_bytes(change if isinstance(change, bytes) else change.encode())
