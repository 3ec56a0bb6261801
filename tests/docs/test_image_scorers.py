"""The scorers of images on the page of DDPO: each program is taken from the page and run, on random weights."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor

from tests.contract.images import PROMPTS
from tests.contract.recipes import make
from tests.contract.runs import rows
from tests.docs.test_docs import ROOT, blocks
from tests.tiny_pipelines import clip_config, clip_tokenizer
from trlx_like.distributed.launcher import free_port
from trlx_like.errors import RewardError

HUB = "openai/clip-vit-large-patch14"
FILE = "sac+logos+ava1-l14-linearMSE.pth"
SHAPES = {0: (1024, 768), 2: (128, 1024), 4: (64, 128), 6: (16, 64), 7: (1, 16)}
"""Of the layers in that file, out x in: those of ddpo-pytorch @1958463 `aesthetic_scorer.py`."""


def program(word: str, **changes: str) -> str:
    """The program on the page that has a word, with other constants."""
    (found,) = [text for text in blocks(ROOT / "docs" / "algorithms" / "ddpo.md", "python") if f"def {word}(" in text]
    for theirs, ours in changes.items():
        assert theirs in found
        found = found.replace(theirs, ours)
    return found


def run(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(text, "ddpo.md", "exec"), names)
    return names


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a CLIP of the true class and embeddings of the true size, and its processor."""
    torch.manual_seed(0)
    folder = str(tmp_path_factory.mktemp("clip"))
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    config = CLIPConfig(text_config=clip_config().to_dict(), vision_config=vision, projection_dim=768)
    CLIPModel(config).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    CLIPProcessor(images, clip_tokenizer()).save_pretrained(folder)
    return folder


def pictures(count: int) -> list[Image.Image]:
    """Of different sizes and kinds."""
    random = np.random.default_rng(0)
    shapes = [(20, 24, 3), (16, 16, 3), (8, 8)]
    return [
        Image.fromarray(random.integers(0, 256, shapes[row % 3], dtype=np.uint8).astype(np.uint8))
        for row in range(count)
    ]


def test_the_cosine_of_clip(clip: str) -> None:
    """Against what CLIP itself says of all pairs, which is that cosine times a scale; in parts as at once."""
    names = run(program("clip_score", **{HUB: clip}))
    images = pictures(5)
    found = names["clip_score"](images=images, prompts=PROMPTS, weight=[1] * 5)
    model, processor = names["clip"], names["processor"]
    batch = processor(text=PROMPTS, images=images, return_tensors="pt", padding=True, truncation=True)
    with torch.no_grad():
        expected = (model(**batch).logits_per_image.diagonal() / model.logit_scale.exp()).tolist()
    assert found == pytest.approx(expected, abs=1e-6)
    assert len(set(found)) == 5 and all(-1 <= score <= 1 for score in found)
    names["SIZE"] = 2
    assert names["clip_score"](images=images, prompts=PROMPTS) == pytest.approx(found, abs=1e-5)


def test_the_aesthetic_predictor(clip: str, tmp_path: Path) -> None:
    """Against its layers in numpy, on a file of the names and shapes that the real one has."""
    random = np.random.default_rng(0)
    layers = {
        number: (random.normal(size=shape) / shape[1] ** 0.5, random.normal(size=shape[0]))
        for number, shape in SHAPES.items()
    }
    weights = {f"layers.{number}.weight": pair[0] for number, pair in layers.items()}
    weights |= {f"layers.{number}.bias": pair[1] for number, pair in layers.items()}
    torch.save({name: torch.from_numpy(value).float() for name, value in weights.items()}, tmp_path / FILE)
    names = run(program("aesthetic_score", **{HUB: clip, f'"{FILE}"': repr(str(tmp_path / FILE))}))
    images = pictures(5)
    found = names["aesthetic_score"](images=images, prompts=PROMPTS)
    batch = CLIPProcessor.from_pretrained(clip)(text=["a"], images=images, return_tensors="pt")
    with torch.no_grad():
        values = CLIPModel.from_pretrained(clip)(**batch).image_embeds.double().numpy()  # of length 1
    for weight, bias in layers.values():
        values = values @ weight.T + bias
    assert found == pytest.approx(values[:, 0].tolist(), abs=1e-5)
    names["SIZE"] = 2
    assert names["aesthetic_score"](images=images) == pytest.approx(found, abs=1e-5)


def test_a_run_with_both(clip: str, tmp_path: Path) -> None:
    """Of DDPO, as several rewards."""
    state = {f"layers.{number}.weight": torch.ones(shape) / shape[1] for number, shape in SHAPES.items()}
    state |= {f"layers.{number}.bias": torch.zeros(shape[0]) for number, shape in SHAPES.items()}
    torch.save(state, tmp_path / FILE)
    functions = [
        run(program("clip_score", **{HUB: clip}))["clip_score"],
        run(program("aesthetic_score", **{HUB: clip, f'"{FILE}"': repr(str(tmp_path / FILE))}))["aesthetic_score"],
    ]
    make("DDPOTrainer", tmp_path / "run", **{"train.total_steps": 1}, reward_fn=functions).learn()
    for row in rows(tmp_path / "run", "samples.jsonl"):
        assert row["reward"] == pytest.approx(row["reward/clip_score"] + row["reward/aesthetic_score"])


@pytest.fixture
def served(clip: str, tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The server of the page on CLIP's score, in a process of its own; the address, and the process."""
    port = free_port()
    (tmp_path / "serve.py").write_text(program("do_POST", **{"8765": str(port)}))
    (tmp_path / "scorer.py").write_text(program("clip_score", **{HUB: clip}))
    command = [sys.executable, "serve.py", "scorer:clip_score"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE
    )
    until = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}", process
    process.kill()
    process.communicate()


def test_a_scorer_in_another_process(clip: str, served: tuple[str, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """Says what it says here; and when it is gone, that is a fault of the reward."""
    address, process = served
    ask = run(program("served_score", **{"http://127.0.0.1:8765": address}))["served_score"]
    here = run(program("clip_score", **{HUB: clip}))["clip_score"]
    images = pictures(5)
    assert ask(images=images, prompts=PROMPTS) == pytest.approx(here(images=images, prompts=PROMPTS), abs=1e-6)
    process.kill()
    process.wait()
    with pytest.raises(RewardError, match=r"served_score raised URLError: .*\n.*\n  prompt: 'ab'"):
        make("DDPOTrainer", tmp_path / "run", reward_fn=ask).learn()
    (fault,) = [json.loads(line) for line in (tmp_path / "run" / "reward_faults.jsonl").read_text().splitlines()]
    assert fault["prompts"] == PROMPTS[:3]


def test_no_program_of_the_page_is_left_out(clip: str) -> None:
    """All but ImageReward's, which needs its package and its weights."""
    tested: Sequence[str] = ("clip_score", "aesthetic_score", "do_POST", "served_score", "reward_fn")
    texts = blocks(ROOT / "docs" / "algorithms" / "ddpo.md", "python")
    others = [text for text in texts if not any(f"def {name}(" in text for name in tested)]
    assert len(others) == 1 and "import ImageReward" in others[0]
