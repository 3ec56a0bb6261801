"""The model card of an exported model: README.md and a picture of the reward, made from the files of its run.

Everything that comes from the run enters the card redacted, and as code: Markdown and HTML in it have no effect.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trlx_like.algorithms import ALGORITHMS
from trlx_like.imports import is_python_name
from trlx_like.models.export import CARD, MARK
from trlx_like.reading import packaged_text
from trlx_like.redact import redacted
from trlx_like.rendering import rendered
from trlx_like.tracking import EVALUATION
from trlx_like.tracking.audit import findings
from trlx_like.tracking.curves import Curve, goals, read_curves
from trlx_like.tracking.folder import read_config, read_rows
from trlx_like.tracking.tables import read_tables

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

logger = logging.getLogger(__name__)

PICTURE = "training.svg"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
FILES = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".py")
EXAMPLES = 3
"""Most prompts with samples in a card."""
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
    config_text, config = read_config(run)
    section = {part: config.get(part) or {} for part in ("model", "train", "method", "data")}
    base, trainer = str(section["model"].get("model_path")), str(section["train"].get("trainer"))
    algorithm = next((one for one in ALGORITHMS if trainer.lower() == one.trainer.lower()), None)
    method = algorithm.prefix if algorithm else trainer.removesuffix("Trainer")
    library, task = _kind(folder, trainer)
    named = base.rpartition(":")[2] if is_python_name(base) else Path(base).name
    # An object from Python is written as a note, which is no name.
    made = f"{named}-{method.lower()}" if re.fullmatch(r"[\w.-]+", named) else run.resolve().name
    title = str(name or section["train"].get("run_name") or made)
    events = [row for row in read_rows(run / "history.jsonl") if "versions" in row]
    text = rendered(
        "card.md",
        data=_metadata(title, base, section["data"], library, task, method, chosen),
        mark=MARK,
        title=title,
        base=base,
        method=method,
        step=step,
        library=library,
        kind=LOADED[task],
        place=repr(title if HUB_NAME.fullmatch(title) else "the folder of this file"),
        heads=(folder / "heads.safetensors").is_file(),
        goals=chosen,
        picture=picture and PICTURE,
        seed=section["train"].get("seed"),
        examples=_examples(run, step),
        audit=findings(run, step),
        config=config_text,
        events=events,
        changes=[f"{change['option']} (step {row['step']})" for row in events for change in row.get("changes", ())],
        paper=citation(algorithm.name) if algorithm else None,
    )
    ModelCard(redacted(text).encode("utf-8", "replace").decode()).save(file)
    return True


def citation(algorithm: str) -> re.Match[str] | None:
    """Find the BibTeX entry of the paper that an algorithm is from, with its number in the group `arxiv`."""
    papers = packaged_text("templates/papers.bib")
    return re.search(rf"@misc{{{algorithm}\d.*?eprint = {{(?P<arxiv>[\d.]+)}}.*?\n}}", papers, re.DOTALL)


def _metadata(
    title: str, base: str, data: Mapping[str, Any], library: str, task: str, method: str, chosen: Sequence[Any]
) -> ModelCardData:
    """Return the YAML at the top of the card, which the hub reads."""
    from huggingface_hub import EvalResult, ModelCardData

    specs = [data.get(key) for key in ("prompts", "samples", "preferences", "eval_prompts")]
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
    return ModelCardData(
        base_model=base if _on_hub(base) or re.fullmatch(r"[\w-]+", base, re.ASCII) else None,
        datasets=datasets or None,
        library_name=library,
        pipeline_tag=task,
        tags=["trlx_like", method.lower()],
        model_name=title if results else None,
        eval_results=results or None,
    )


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


def _examples(run: Path, step: int) -> dict[str, Any] | None:
    """Return rows of the first and of the last evaluation, of the same prompts; None if there are no two."""
    table = next((one for one in read_tables(run / "samples.jsonl")[0] if one["name"] == EVALUATION), None)
    shown = [one for one in table["steps"] if one["step"] <= step] if table else []
    if table is None or not {"prompt", "output"} <= set(table["columns"]) or len(shown) < 2:
        return None
    first, last = (
        {
            str(row["prompt"]): row
            for row in (dict(zip(table["columns"], cells, strict=True)) for cells in one["rows"][::-1])
        }
        for one in (shown[0], shown[-1])
    )
    prompts = [prompt for prompt in first if prompt in last][:EXAMPLES]
    return {
        "steps": (shown[0]["step"], shown[-1]["step"]),
        "rows": [(prompt, first[prompt], last[prompt]) for prompt in prompts],
    }


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

    def point(step: int, value: float) -> str:
        x, y = 70 + 550 * (step - start) / max(1, end - start), 220 - 180 * (value - low) / ((high - low) or 1)
        return f"{x:.1f},{y:.1f}"

    pairs = zip(summary["steps"], summary["values"], strict=True)
    runs = groupby(pairs, key=lambda pair: pair[1] is not None)
    lines = [[point(*pair) for pair in run] for finite, run in runs if finite]
    ends = {"name": curve.name, "low": f"{low:.4g}", "high": f"{high:.4g}", "start": start, "end": end}
    return rendered("training.svg", lines=lines, **ends)
