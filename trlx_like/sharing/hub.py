"""The upload of an exported run to the Hugging Face Hub, by huggingface_hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from trlx_like.errors import ConfigError
from trlx_like.sharing.card import HUB_NAME
from trlx_like.sharing.export import export_run


def push(run: Path, repo: str, *, private: bool | None = None, dry_run: bool = False, **options: Any) -> list[str]:
    """Export a run and upload it to a model repository, in one commit.

    The hub keeps large files that arrived before a failure, so a second call uploads only the others.

    Args:
        run: A run folder or a checkpoint, as for `export_run`.
        repo: The repository, as owner/name. It is made if it does not exist.
        private: Whether a repository that is made is private; None: as the owner's account says.
        dry_run: Upload nothing, and use no network.
        options: `merge` and `dtype` of `export_run`.

    Returns:
        Lines that say what was, or would be, uploaded.

    Raises:
        ConfigError: If the name is none of a repository, or the hub or the network refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if not HUB_NAME.fullmatch(repo):
        raise ConfigError(f"{repo!r} must be the name of a repository, OWNER/NAME.")

    # The first base is the error of the HTTP library, which is another one in other releases of huggingface_hub. An
    # upload of a large file that fails is a RuntimeError.
    refusals: tuple[Any, ...] = (HfHubHTTPError.__bases__[0], HFValidationError, OSError, RuntimeError)
    with tempfile.TemporaryDirectory(prefix="trlx_like-push-") as place:
        folder = Path(place) / "model"
        checkpoint, _ = export_run(run, folder, name=repo, **options)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        listed = [f"{file.relative_to(folder)} ({file.stat().st_size:,} bytes)" for file in files]
        if dry_run:
            return [f"Would upload {checkpoint} to {repo}:", *listed]
        try:
            api = HfApi()
            api.create_repo(repo, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo, folder_path=folder, commit_message=f"{run.resolve().name}, {checkpoint.name}"
            )
        except refusals as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(
                f"{repo}: the upload failed: {why} Log in with `hf auth login`, or set HF_TOKEN."
            ) from error
    return [f"Uploaded {checkpoint} to {commit.commit_url}.", *listed]
