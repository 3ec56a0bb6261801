"""The pages say what is there: tables, metrics, files, programs, commands and links are held against the code."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

import trlx_like
from scripts.configuration_page import BLOCK, filled, sections
from tests.contract.recipes import RECIPES, count_letters, make
from tests.tiny import save_tiny
from tests.tiny_pipelines import saved
from trlx_like.cli import app
from trlx_like.config import TRLConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CONFIGS = sorted((ROOT / "configs").glob("*.yml"))

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    return [text for name, _, text in FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


def files(page: Path) -> dict[str, str]:
    """The blocks of a page that have a title: the file that a reader is to write."""
    return {title: text for _, title, text in FENCE.findall(page.read_text(encoding="utf-8")) if title}


# Tables of options.


@every_page
def test_the_tables_of_options_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert filled(text) == text, "run .venv/bin/python scripts/configuration_page.py"


def test_every_section_has_a_table() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert {name for _, name, _ in BLOCK.findall(text)} == set(sections())
    assert "| `num_layers_unfrozen` | a whole number of at least -1 | `-1` |" in text


# Metrics.


def documented_metrics() -> set[str]:
    """The names in the first columns of the tables of our metrics."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").partition("## Theirs")[0]
    cells = re.findall(r"^\| (`[^|]*`) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_metric_says_over_what_it_is_taken() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").partition("## Theirs")[0]
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    heads = [line for line in lines if line[0] == "| metric"]
    assert heads and all(line[1] == "over" for line in heads)
    assert all(line[1].strip() for line in lines)


def test_the_metrics_that_are_logged_are_those_documented(tmp_path: Path) -> None:
    logged: set[str] = set()
    several = {"reward_fn": [count_letters, lambda outputs: [None for _ in outputs]]}
    for name in RECIPES:
        more = several if name == "PPOTrainer" else {}
        changes = {"train.total_steps": 2, "train.seq_length": 12}  # so that some data is cut
        make(name, tmp_path / name, **changes, **more).learn()
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        logged |= {metric.removeprefix("eval/") for line in lines for metric in json.loads(line)}
    named = {metric for metric in logged if metric.startswith("metrics/")}
    logged = logged - named | {"metrics/<name>"}
    assert {"reward/lambda/mean", "rollout/reward/lambda/mean"} <= logged
    # Logged by the runs of tests/contract/test_nonfinite.py and tests/unit/trainers/test_online.py, test_empty.py,
    # test_groups.py and test_replay.py.
    logged |= {"train/nonfinite_steps", "policy/rollout_ratio", "policy/rollout_ratio_capped", "rollout/empty_rounds"}
    logged |= {"rollout/max_at_k", "rollout/replayed"}
    assert documented_metrics() == {re.sub("/(count_letters|lambda)/", "/<name>/", metric) for metric in logged}


# Files and programs.


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_the_configurations_load(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert TRLConfig.load_yaml(file).train.checkpoint_dir.startswith("runs/")


@every_page
def test_the_yaml_on_the_pages_loads(page: Path, tmp_path: Path) -> None:
    for text in blocks(page, "yaml"):
        if "train" in yaml.safe_load(text):
            (tmp_path / "page.yml").write_text(text)
            assert TRLConfig.load_yaml(tmp_path / "page.yml").train.trainer in text


@every_page
def test_the_programs_on_the_pages_use_names_that_exist(page: Path) -> None:
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "trlx_like":
                for alias in node.names:
                    assert hasattr(importlib.import_module(node.module or ""), alias.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "trlx_like":
                assert hasattr(trlx_like, node.attr)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "TRLConfig.from_dict":
                TRLConfig.from_dict(ast.literal_eval(node.args[0]))


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        *(
            f"docs/algorithms/{name}.md"
            for name in ("distill", "dpo", "grpo", "online_dpo", "ppo", "reward", "rft", "rloo", "sft")
        ),
    ],
)
def test_the_first_program_of_a_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = blocks(ROOT / name, "python")[0]
    assert "gpt2" in program
    program = program.replace("gpt2-large", "gpt2").replace("gpt2", save_tiny(tmp_path / "model"))
    program = re.sub(r'(total_steps"?[:=] ?)\d+', r"\g<1>2", program)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(program, name, "exec"), names)
    assert names["trainer"].progress.step == 2


@pytest.mark.parametrize("name", ["start", "tasks/scorer", "tasks/pairs", "tasks/logs", "tasks/images"])
def test_the_programs_of_a_page_run_in_its_order(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = ROOT / "docs" / f"{name}.md"
    model = save_tiny(tmp_path / "model", n_positions=128)
    smaller = {
        r"\bgpt2\b": model,
        "stable-diffusion-v1-5/stable-diffusion-v1-5": saved("sd"),
        r'(total_steps"?[:=] ?)\d+': r"\g<1>2",
        r"num_samples=64, num_inference_steps=30": "num_samples=4, num_inference_steps=3",
    }

    def reduced(text: str) -> str:
        for pattern, replacement in smaller.items():
            text = re.sub(pattern, replacement, text)
        return text

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for title, text in files(page).items():
        (tmp_path / title).write_text(reduced(text))
        monkeypatch.delitem(sys.modules, Path(title).stem, raising=False)
    trainers, names = [], dict[str, Any]()
    for program in blocks(page, "python"):
        exec(compile(reduced(program), str(page), "exec"), names)
        trainers += [value for value in names.values() if hasattr(value, "learn") and value not in trainers]
    assert trainers
    assert {trainer.progress.step for trainer in trainers} == {2}


def test_the_program_for_images_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = blocks(ROOT / "docs" / "algorithms" / "ddpo.md", "python")[0]
    for theirs, ours in {
        "stable-diffusion-v1-5/stable-diffusion-v1-5": saved("sd"),
        "total_steps=100": "total_steps=2",
        "num_samples=64, num_inference_steps=30": "num_samples=4, num_inference_steps=3",
    }.items():
        assert theirs in program
        program = program.replace(theirs, ours)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(program, "ddpo.md", "exec"), names)
    assert names["trainer"].progress.step == 2
    assert (tmp_path / "meadow.png").is_file()


def commands() -> Iterator[str]:
    """The lines of the pages that are to be typed, without their comments."""
    for page in PAGES:
        for line in "".join(blocks(page, "")).splitlines():
            if line.startswith(("trlx-like ", "python ", ".venv")):
                yield line.partition("  #")[0].strip()
    yield from re.findall(r"`(python -m [^`]+)`", (ROOT / "docs" / "results.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("line", dict.fromkeys(commands()))
def test_the_commands_on_the_pages_exist(line: str) -> None:
    program, *words = shlex.split(line)
    if program == "trlx-like":
        group: Any = typer.main.get_command(app)
        with group.commands[words[0]].make_context(words[0], words[1:]) as context:
            config = str(context.params.get("config", "README.md"))
            assert (ROOT / config).is_file() or any(config in files(page) for page in PAGES)
    elif words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None
    else:
        assert (ROOT / words[0]).is_file()


def test_the_extras_that_texts_and_errors_name_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    sources = [file for folder in ("trlx_like", "examples", "benchmarks") for file in (ROOT / folder).rglob("*.py")]
    named = {
        (file.name, extra)
        for file in [*PAGES, *sources]
        for given in re.findall(
            r"""pip install [^\n]*?(?:\.|trlx-like)\[([\w,]+)\]""", file.read_text(encoding="utf-8")
        )
        for extra in given.split(",")
    }
    assert {extra for _, extra in named} >= {"peft", "diffusion", "datasets"}
    assert [(file, extra) for file, extra in sorted(named) if extra not in extras] == []


# Links.


def anchors(page: Path) -> set[str]:
    """What a link may name after `#`, as GitHub makes it from headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_the_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if not link.startswith("http"):
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
