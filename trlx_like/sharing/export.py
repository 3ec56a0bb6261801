"""The export of a run: its model in a folder of its own, with a model card, for plain transformers or diffusers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from trlx_like.checkpoint import MANIFEST, CheckpointStore
from trlx_like.errors import ConfigError, DataError, writing
from trlx_like.models.export import CARD
from trlx_like.sharing.card import add_card

ADAPTER = "adapter_config.json"
DTYPES = ("float32", "bfloat16", "float16")


def checkpoint_in(folder: Path) -> Path | None:
    """Find a checkpoint: the folder itself, or of a run folder the best or else the newest one; None without one.

    Raises:
        CheckpointError: If it is damaged.
    """
    store = CheckpointStore(folder)
    chosen = next((place for place in (folder, folder / "best_checkpoint") if (place / MANIFEST).is_file()), None)
    if chosen is None:
        return store.newest()
    store.verify(chosen)
    return chosen


def export_run(
    run: Path, to: Path, *, merge: bool = False, dtype: str | None = None, name: str | None = None
) -> tuple[Path, bool]:
    """Copy the model of a run to a folder, and write its model card.

    Args:
        run: A run folder, of which the best checkpoint is taken or else the newest, or a checkpoint.
        to: The folder to write. It may exist with a README.md, which is kept, and hidden files.
        merge: Merge an adapter into its model, so that peft is not needed.
        dtype: The number format of the weights, one of `DTYPES`; None: as they are.
        name: Name of the model in its card.

    Returns:
        The checkpoint, and whether the card was written.

    Raises:
        DataError: If there is no checkpoint.
        ConfigError: If the folder has other files, there is nothing to merge, or the dtype is unknown.
        DiskError: If the disk refuses.
    """
    checkpoint = checkpoint_in(run) if run.is_dir() else None
    if checkpoint is None:
        raise DataError(f"{run} is not a checkpoint, or a run with a checkpoint.")
    source = checkpoint / "hf_model"
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype ({dtype}) must be one of {', '.join(DTYPES)}.")
    if merge and not (source / ADAPTER).is_file():
        raise ConfigError(f"--merge: {source} has no adapter for a language model to merge.")
    if to.exists() and (not to.is_dir() or any(one.name != CARD and one.name[0] != "." for one in to.iterdir())):
        raise ConfigError(f"--to ({to}) has files already; name a new folder.")
    with writing(to):
        left_out = shutil.ignore_patterns(CARD, *["adapter_*"] * merge)
        shutil.copytree(source, to, ignore=left_out, dirs_exist_ok=True)
        if merge:
            _merge(source, to)
        if dtype is not None:
            _convert(to, dtype)
        progress = json.loads((checkpoint / "state" / "shared" / "progress.json").read_bytes())
        return checkpoint, add_card(to, checkpoint.parent, progress["tree"]["step"], name)


def _merge(source: Path, to: Path) -> None:
    """Save the model of an adapter's folder with the adapter merged."""
    from trlx_like.config import ModelConfig
    from trlx_like.models.export import save_model
    from trlx_like.models.loading import arch_type, load_model

    kind = arch_type(str(source))
    save_model(load_model(str(source), ModelConfig(model_path=str(source), model_arch_type=kind)), to, merge=True)


def _convert(folder: Path, dtype: str) -> None:
    """Convert the weights of a model's files, but not of trained heads, whose loaders expect float32."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    wanted = getattr(torch, dtype)
    for file in folder.rglob("*.safetensors"):
        if file.name == "heads.safetensors":
            continue
        with safe_open(file, "pt") as saved:
            weights = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118
            metadata = saved.metadata()
        converted = {name: value.to(wanted) if value.is_floating_point() else value for name, value in weights.items()}
        save_file(converted, file, metadata)
    for file in folder.rglob("config.json"):
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if config.keys() & {"dtype", "torch_dtype"}:
            config.pop("torch_dtype", None)
            file.write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")
