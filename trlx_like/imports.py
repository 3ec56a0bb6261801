"""Import the functions that a YAML file names as `module:function` or `path/to/file.py:function`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from trlx_like.errors import ConfigError, TrlxError


def is_python_name(value: object) -> bool:
    """Return whether a value is `module:attribute` or `file.py:attribute`, and not a path such as `C:\\models`."""
    if not isinstance(value, str) or ":" not in value:
        return False
    place, _, attribute = value.rpartition(":")
    return attribute.isidentifier() and (place.endswith(".py") or all(p.isidentifier() for p in place.split(".")))


def import_file(path: Path) -> ModuleType:
    """Import a Python file and return its module. The running script, or a file imported before, is not run again."""
    path = Path(os.path.expanduser(path)).resolve()
    for module in list(sys.modules.values()):
        if _is_from(module, path):
            return module
    name = _file_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def import_module(name: str) -> ModuleType:
    """Import a module by its dotted name, also from the current folder, as a script there would."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(here)


def import_name(name: str, option: str) -> Any:
    """Import and return the attribute that `module:name` or `file.py:name` stands for. Errors name `option`."""
    place, _, attribute = os.path.expanduser(name).rpartition(":")
    if not is_python_name(name):
        raise ConfigError(f"{option} ({name!r}) must be module:function or path/to/file.py:function.")
    if place.endswith(".py") and not Path(place).is_file():
        raise ConfigError(f"{option} ({name!r}): there is no file {place} in {Path.cwd()}.")
    try:
        module = import_file(Path(place)) if place.endswith(".py") else import_module(place)
    except TrlxError:
        raise
    except (Exception, SystemExit) as error:  # a script may end itself
        raise ConfigError(f"{option} ({name!r}) cannot be imported: {raised(error)}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{option} ({name!r}): {place} has no {attribute!r}.")
    return getattr(module, attribute)


def called_by_name(value: Any, option: str) -> Any:
    """Return what the function of a Python name returns; a value that is no such name is returned as it is."""
    return import_name(value, option)() if is_python_name(value) else value


@contextmanager
def needed(what: str, extra: str) -> Iterator[None]:
    """Name the extra to install if an import in the block fails.

    Args:
        what: Says what needs which package, such as "adapters need peft".
        extra: The extra of this package that has it.

    Raises:
        ConfigError: An import failed.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{what} ({error}): {install_hint(extra)}.") from error


def install_hint(extra: str) -> str:
    """Return the command that installs an extra. It also works if the package itself is installed already."""
    return f'pip install "trlx-like[{extra}]", or in a clone: pip install -e ".[{extra}]"'


def raised(error: BaseException) -> str:
    """Describe an exception that a user's code raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [] if isinstance(error, (SyntaxError, ImportError)) else frames[-1:]
    return f"{type(error).__name__}: {error}" + "".join(f" ({frame.filename}:{frame.lineno})" for frame in own)


def file_modules() -> dict[str, str]:
    """Return the files that `import_file` has imported, by the names of their modules."""
    named = [(name, module) for name, module in list(sys.modules.items()) if len(name.rpartition("_")[2]) == 12]
    files = {name: getattr(module, "__file__", None) for name, module in named}
    return {name: file for name, file in files.items() if file and name == _file_name(Path(file))}


def _file_name(path: Path) -> str:
    return f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"


def _is_from(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)  # of thousands of modules, so text is compared before paths
    return isinstance(file, str) and file.endswith(path.name) and Path(file).resolve() == path
