"""The model card of an exported model: README.md and a picture of the reward, made from the files of its run.

Everything that comes from the run enters the card redacted, and as code: Markdown and HTML in it have no effect.
"""

from __future__ import annotations

import html
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trlx_like.algorithms import ALGORITHMS, Algorithm
from trlx_like.models.export import CARD, MARK
from trlx_like.redact import redacted
from trlx_like.tracking import EVALUATION
from trlx_like.tracking.audit import findings
from trlx_like.tracking.curves import Curve, goals, read_curves
from trlx_like.tracking.folder import read_config, read_row
from trlx_like.tracking.tables import read_tables

logger = logging.getLogger(__name__)

PICTURE = "training.svg"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
FILES = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".py")
EXAMPLES, LONGEST = 3, 600
"""Most prompts with samples in a card, and the most characters of each text."""
LOADED = {
    "text-to-image": "DiffusionPipeline",
    "text-classification": "AutoModelForSequenceClassification",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "text-generation": "AutoModelForCausalLM",
}
"""The class that loads a model, by the task of its card."""


def add_card(folder: Path, run: Path, step: int, name: str | None = None) -> bool:
    """Write README.md and a picture of the reward into the folder of an exported model.

    A README.md that no program has written stays as it is. Without a config.yml in the run folder there is no card.

    Args:
        folder: The exported model.
        run: The run folder that it is from.
        step: Optimizer steps that the model was trained for. What the run logged after them is left out.
        name: Name of the model, such as owner/name on the hub; None: `train.run_name`, or one made of model and method.

    Returns:
        Whether the card was written.
    """
    from huggingface_hub import ModelCard

    file = folder / CARD
    if not (run / "config.yml").is_file():
        return False
    if file.is_file() and MARK not in file.read_text(encoding="utf-8", errors="replace"):
        logger.warning("%s was there and is kept, so the model has no card of this run.", file)
        return False
    curves, _ = read_curves(run / "metrics.jsonl", step)
    chosen = goals(curves)
    picture = drawing(curves[chosen[0]["name"]]) if chosen else None
    if picture is not None:
        (folder / PICTURE).write_text(picture, encoding="utf-8")
    text = redacted("".join(_sections(folder, run, step, name, chosen, picture is not None)))
    ModelCard(text.encode("utf-8", "replace").decode()).save(file)
    return True


def _sections(
    folder: Path, run: Path, step: int, name: str | None, chosen: Sequence[Mapping[str, Any]], drawn: bool
) -> Iterator[str]:
    """Yield the parts of the card in order."""
    config_text, config = read_config(run)
    section = {part: config.get(part) or {} for part in ("model", "train", "method", "data")}
    base, seed = str(section["model"].get("model_path")), section["train"].get("seed")
    trainer = str(section["train"].get("trainer"))
    algorithm = next((one for one in ALGORITHMS if trainer.lower() == one.trainer.lower()), None)
    method = algorithm.prefix if algorithm else trainer.removesuffix("Trainer")
    library, task = _kind(folder, trainer)
    title = name or section["train"].get("run_name") or f"{Path(base).name}-{method.lower()}"
    yield _metadata(str(title), base, section, library, task, method, chosen)
    yield f"{MARK}\n\n# {_plain(title)}\n\n"
    yield f"{_code(base)} tuned with {_plain(method)} by trlx_like, {step} optimizer steps.\n\n## Use\n\n"
    yield _fenced(_use(str(title), library, task), "python")
    if (folder / "heads.safetensors").is_file():
        kind = "ValueHead" if method != "ILQL" else "ILQLHeads"
        yield (
            f"The trained heads are in `heads.safetensors`; `trlx_like.{LOADED[task]}With{kind}"
            ".from_pretrained` loads both.\n\n"
        )
    if chosen:
        yield "## Training\n\n"
        yield f"![{_plain(chosen[0]['name'])} by optimizer step]({PICTURE})\n\n" * drawn
        yield "| metric | first | last | lowest | highest |\n|---|---|---|---|---|\n"
        for goal in chosen:
            cells = (f"{goal[at]['value']:.5g} (step {goal[at]['step']})" for at in ("first", "last", "min", "max"))
            yield f"| {_code(goal['name'])} | {' | '.join(cells)} |\n"
        yield f"\nMeasured by the run itself on its evaluation data, with seed {seed}.\n\n"
    yield _examples(run, step)
    yield _limits(run, step)
    yield "## Configuration\n\nWith this text as `config.yml`, its data and functions and these versions, "
    yield f"`trlx-like train config.yml` makes the run again.\n\n{_fenced(config_text, 'yaml')}"
    events = [row for row in map(read_row, _lines(run / "history.jsonl")) if row and "versions" in row]
    if events:
        versions = ", ".join(f"{package} {number}" for package, number in events[-1]["versions"].items())
        yield f"Versions: {_plain(versions)}; processes: {events[-1].get('processes', 1)}.\n\n"
    if changed := [f"{change['option']} (step {row['step']})" for row in events for change in row.get("changes", ())]:
        yield f"Changed in the middle of the run: {_plain(', '.join(changed))}.\n\n"
    yield _citation(algorithm)


def _metadata(
    title: str, base: str, section: Mapping[str, Any], library: str, task: str, method: str, chosen: Sequence[Any]
) -> str:
    """Return the YAML at the top of the card, which the hub reads."""
    from huggingface_hub import EvalResult, ModelCardData

    specs = [section["data"].get(key) for key in ("prompts", "samples", "preferences", "eval_prompts")]
    parts = [part for spec in specs for part in (spec.get("mix", [spec]) if isinstance(spec, dict) else [spec])]
    paths = [str(part.get("path") if isinstance(part, dict) else part).partition(":")[0] for part in parts]
    datasets = [path for path in dict.fromkeys(paths) if _on_hub(path)]
    results = [
        EvalResult(
            task_type=task,
            dataset_type=datasets[0] if datasets else "evaluation data of the run",
            dataset_name=datasets[0] if datasets else "evaluation data of the run",
            metric_type=goal["name"],
            metric_value=goal["last"]["value"],
        )
        for goal in chosen
    ]
    data = ModelCardData(
        base_model=base if _on_hub(base) or re.fullmatch(r"[\w-]+", base, re.ASCII) else None,
        datasets=datasets or None,
        library_name=library,
        pipeline_tag=task,
        tags=["trlx_like", method.lower()],
        model_name=title if results else None,
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _kind(folder: Path, trainer: str) -> tuple[str, str]:
    """Return the library that loads an exported model, and its task, by the names of the hub."""
    if (folder / "model_index.json").is_file() or trainer == "DDPOTrainer":
        return "diffusers", "text-to-image"
    library = "peft" if (folder / "adapter_config.json").is_file() else "transformers"
    if trainer == "RewardTrainer":
        return library, "text-classification"
    file = folder / ("adapter_config.json" if library == "peft" else "config.json")
    made: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    seq2seq = made.get("is_encoder_decoder") or made.get("task_type") == "SEQ_2_SEQ_LM"
    return library, "text2text-generation" if seq2seq else "text-generation"


def _on_hub(path: str) -> bool:
    return bool(HUB_NAME.fullmatch(path)) and not path.endswith(FILES) and not Path(path).exists()


def _use(title: str, library: str, task: str) -> str:
    """Return the lines that load the model."""
    kind, place = LOADED[task], repr(title if HUB_NAME.fullmatch(title) else "the folder of this file")
    if library == "diffusers":
        return f"from diffusers import {kind}\n\npipeline = {kind}.from_pretrained({place})"
    lines = f"from transformers import AutoTokenizer, {kind}\n\n"
    lines += f"tokenizer = AutoTokenizer.from_pretrained({place})\nmodel = {kind}.from_pretrained({place})"
    return lines + "  # needs peft\n" * (library == "peft")


def _examples(run: Path, step: int) -> str:
    """Return outputs of the first and of the last evaluation, to the same prompts."""
    table = next((one for one in read_tables(run / "samples.jsonl")[0] if one["name"] == EVALUATION), None)
    shown = [one for one in table["steps"] if one["step"] <= step] if table else []
    if table is None or not {"prompt", "output"} <= set(table["columns"]) or len(shown) < 2:
        return ""
    at = {name: place for place, name in enumerate(table["columns"])}
    first, last = ({str(row[at["prompt"]]): row for row in reversed(one["rows"])} for one in (shown[0], shown[-1]))
    steps = f"{shown[0]['step']} and {shown[-1]['step']}"
    text = f"## Samples before and after\n\nOf the evaluations at steps {steps}.\n\n"
    for prompt in list(dict.fromkeys(p for p in first if p in last))[:EXAMPLES]:
        text += f"Prompt:\n\n{_fenced(prompt)}"
        for word, row in (("Before", first[prompt]), ("After", last[prompt])):
            reward = row[at["reward"]] if "reward" in at else None
            scored = f" (reward {reward:.4g})" if isinstance(reward, int | float) else ""
            text += f"{word}{scored}:\n\n{_fenced(row[at['output']])}"
    return text


def _limits(run: Path, step: int) -> str:
    """Return what the audit of reward hacking says about the run."""
    audit = findings(run, step)
    text = "## Known limits\n\nThe model was tuned to a reward or to examples, and measured on the data above alone.\n"
    if audit is None:
        return text + "The audit of reward hacking had nothing to judge in this run.\n\n"
    found = [one for one in audit["verdicts"] if one["found"]]
    if not found:
        return text + f"The audit found no sign of reward hacking in {audit['rounds']} rounds.\n\n"
    signs = "".join(f"- {_plain(one['name'])} ({one['state']}): {_plain(one['words'])}\n" for one in found)
    return f"{text}Signs of reward hacking:\n\n{signs}\n"


def _citation(algorithm: Algorithm | None) -> str:
    if algorithm is None or algorithm.paper is None:
        return ""
    title, authors, year, number = algorithm.paper
    entry = (
        f"@misc{{{algorithm.name}{year},\n  title = {{{title}}},\n  author = {{{authors}}},\n  year = {{{year}}},\n"
        f"  eprint = {{{number}}},\n  archivePrefix = {{arXiv}},\n  url = {{https://arxiv.org/abs/{number}}}\n}}"
    )
    where = f"[arXiv:{number}](https://arxiv.org/abs/{number})"
    return f"## Citation\n\nThe method is that of {where}.\n\n{_fenced(entry, 'bibtex')}"


def drawing(curve: Curve) -> str | None:
    """Draw a curve as an SVG picture of 640 by 260 pixels; return None if fewer than two values are finite.

    Args:
        curve: The values of a metric over the run.
    """
    summary = curve.summary()
    if summary is None or summary["count"] - summary["bad"] < 2:
        return None
    low, high = summary["min"]["value"], summary["max"]["value"]
    start, end = summary["steps"][0], summary["steps"][-1]
    lines: list[list[str]] = []
    line: list[str] = []
    for step, value in zip(summary["steps"], summary["values"], strict=True):
        if value is None:
            lines, line = [*lines, line], []
        else:
            x, y = 70 + 550 * (step - start) / max(1, end - start), 220 - 180 * (value - low) / ((high - low) or 1)
            line.append(f"{x:.1f},{y:.1f}")
    drawn = "".join(
        f'<polyline points="{" ".join(points)}" fill="none" stroke="#00796b" stroke-width="2"/>'
        for points in [*lines, line]
    )
    texts = "".join(
        f'<text x="{x}" y="{y}" text-anchor="{side}">{html.escape(text)}</text>'
        for x, y, side, text in (
            *((70, 25, "start", curve.name), (62, 45, "end", f"{high:.4g}"), (62, 224, "end", f"{low:.4g}")),
            *((70, 242, "start", f"step {start}"), (620, 242, "end", str(end))),
        )
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 260" width="640" height="260" font-family="Arial" '
        f'font-size="13" fill="#333"><rect width="640" height="260" fill="#fff"/><path d="M70 40V220H620" fill="none" '
        f'stroke="#999"/>{drawn}{texts}</svg>\n'
    )


def _lines(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines() if file.is_file() else []


def _plain(text: Any) -> str:
    """Return a text on one line in which neither Markdown nor HTML has an effect."""
    return re.sub(r"([\\`*_\[\]|~<>&])", r"\\\1", " ".join(str(text).split()))


def _code(text: Any) -> str:
    """Return a text as code within a line or a cell of a table."""
    shown = " ".join(str(text).split()).replace("|", "\\|")
    ticks = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{ticks}{shown}{ticks}" if len(ticks) == 1 else f"{ticks} {shown} {ticks}"


def _fenced(text: Any, language: str = "text") -> str:
    """Return a text as a block of code, cut to `LONGEST` characters if it is a sample."""
    shown = str(text).replace("\x00", "")
    if language == "text" and len(shown) > LONGEST:
        shown = f"{shown[:LONGEST]} ... ({len(shown) - LONGEST} more characters)"
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", shown)), default=0))
    return f"{fence}{language}\n{shown.rstrip()}\n{fence}\n\n"
