"""The model card: what it says of a run, and that nothing in a run can act on the page that shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from trlx_like.algorithms import ALGORITHMS
from trlx_like.sharing.card import add_card, citation, drawing
from trlx_like.tracking.curves import Curve

HOSTILE = (
    "<script>alert(1)</script> ![x](http://evil/x.png) `` ` ``` ````\n```\n# Heading\n"
    "<img src=x onerror=alert(2)> | \x00"
)
TOKEN = "hf_" + "a1" * 17


def a_run(folder: Path, text: str = "ab", **train: Any) -> Path:
    folder.mkdir()
    config = {
        "model": {"model_path": "owner/base"},
        "train": {"trainer": "PPOTrainer", "seed": 7, **train},
        "method": {"name": "PPOConfig"},
        "data": {"prompts": "owner/questions:train[:9]", "eval_prompts": "data/mine.jsonl"},
    }
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    metrics = [{"step": step, "reward/mean": reward} for step, reward in ((0, 0.25), (2, 0.5), (4, 1.0), (6, -1.0))]
    samples = [
        {"step": step, "table": "samples", "prompt": f"say {text}", "output": f"{step} {text}", "reward": step / 8}
        for step in (0, 2, 4, 6)
    ]
    for name, rows in (("metrics.jsonl", metrics), ("samples.jsonl", samples)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    event = {"step": 2, "event": "resumed", "versions": {"torch": "2.13"}, "processes": 2}
    (folder / "history.jsonl").write_text(json.dumps({**event, "changes": [{"option": "method.gamma"}]}) + "\n")
    return folder


def card_of(folder: Path, run: Path, step: int = 4, **options: Any) -> str:
    folder.mkdir(exist_ok=True)
    assert add_card(folder, run, step, **options)
    return (folder / "README.md").read_text(encoding="utf-8")


def test_what_a_card_says(tmp_path: Path) -> None:
    text = card_of(tmp_path / "hf", a_run(tmp_path / "run"), name="me/mine")
    data: Any = ModelCard(text).data
    assert (data.base_model, data.datasets, data.library_name) == ("owner/base", ["owner/questions"], "transformers")
    assert (data.pipeline_tag, data.tags) == ("text-generation", ["trlx_like", "ppo"])
    assert data.eval_results and [(one.metric_type, one.metric_value) for one in data.eval_results] == [
        ("reward/mean", 1.0)
    ]
    assert "| `reward/mean` | 0.25 (step 0) | 1 (step 4) | 0.25 (step 0) | 1 (step 4) |" in text
    assert (
        "with seed 7" in text
        and "4 optimizer steps" in text
        and "AutoModelForCausalLM.from_pretrained('me/mine')" in text
    )
    assert "steps 0 and 4" in text and "```text\n0 ab\n```" in text and "(reward 0.5):\n\n```text\n4 ab" in text
    assert "6 ab" not in text  # what came after the checkpoint is not of this model
    assert "torch 2.13; processes: 2" in text and "Changed in the middle of the run: method.gamma (step 2)" in text
    assert "url = {https://arxiv.org/abs/1707.06347}" in text and "`trlx-like train config.yml`" in text
    assert "![reward/mean by optimizer step](training.svg)" in text and (tmp_path / "hf" / "training.svg").is_file()


@pytest.mark.parametrize(
    ("base", "title"),
    [
        ("owner/base", "base-ppo"),
        ("examples/randomwalks/start.py:start", "start-ppo"),
        ("trlx_like.testing:tiny_gpt2", "tiny_gpt2-ppo"),
        ("GPT2Config {...} from Python", "run"),
    ],
)
def test_a_card_without_a_name_is_called_after_what_the_model_is_made_of(base: str, title: str, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    config = yaml.safe_load((run / "config.yml").read_text())
    (run / "config.yml").write_text(yaml.safe_dump({**config, "model": {"model_path": base}}))
    assert f"\n# {title.replace('_', chr(92) + '_')}\n" in card_of(tmp_path / "hf", run)


def test_nothing_in_a_run_acts_on_the_page(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", HOSTILE, run_name=HOSTILE, tags=[f"token {TOKEN}", HOSTILE])
    text = card_of(tmp_path / "hf", run)
    assert TOKEN not in text and "<redacted>" in text
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(text.split("\n---\n", 1)[1])
    assert "<script" not in page and page.count("<img") == 1 and "Heading</h1>" not in page
    assert page.count("<h2>") == 6  # no block of code was left open
    assert ModelCard(text).data.to_dict()["model-index"][0]["name"] == HOSTILE


def test_a_readme_of_the_users_is_kept(tmp_path: Path) -> None:
    run, folder = a_run(tmp_path / "run"), tmp_path / "hf"
    card_of(folder, run)
    assert "2 optimizer steps" in card_of(folder, run, 2)  # its own is replaced
    (folder / "README.md").write_text("mine")
    assert not add_card(folder, run, 4)
    assert (folder / "README.md").read_text() == "mine"


@pytest.mark.parametrize(
    ("trainer", "file", "content", "library", "task"),
    [
        ("DDPOTrainer", "model_index.json", "{}", "diffusers", "text-to-image"),
        ("RewardTrainer", "config.json", "{}", "transformers", "text-classification"),
        ("SFTTrainer", "config.json", '{"is_encoder_decoder": true}', "transformers", "text2text-generation"),
        ("DPOTrainer", "adapter_config.json", '{"task_type": "SEQ_2_SEQ_LM"}', "peft", "text2text-generation"),
    ],
)
def test_kinds_of_models(trainer: str, file: str, content: str, library: str, task: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / file).write_text(content)
    data: Any = ModelCard(card_of(folder, a_run(tmp_path / "run", trainer=trainer))).data
    assert (data.library_name, data.pipeline_tag) == (library, task)


def test_a_curve_golden() -> None:
    curve = Curve("a <b>")
    assert drawing(curve) is None
    for step, value in ((0, 1.0), (1, 2.0), (2, float("nan")), (3, 1.5), (4, 3.0)):
        curve.steps.append(step)
        curve.values.append(value)
    picture = drawing(curve)
    # Four steps on 550 points from 70; values 1 to 3 on 180 points up from 220. The gap parts the line.
    assert picture is not None and 'points="70.0,220.0 207.5,130.0"' in picture
    assert 'points="482.5,175.0 620.0,40.0"' in picture and "a &lt;b&gt;" in picture


def test_every_paper_is_on_the_page_of_its_algorithm() -> None:
    pages = Path(__file__).resolve().parents[3] / "docs" / "algorithms"
    papers = {one.name: citation(one.name) for one in ALGORITHMS}
    assert [name for name, paper in papers.items() if paper is None] == ["sft"]
    for name, paper in papers.items():
        assert paper is None or paper["arxiv"] in (pages / f"{name}.md").read_text(encoding="utf-8"), name
