"""Files and modules that a plugin is imported from: once, by any name, and with the cause where it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trlx_like.errors import RegistryError
from trlx_like.registry import load_plugin


def test_a_plugin_file_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = tmp_path / "counted.py"
    plugin.write_text("import sys\nsys.plugin_runs = getattr(sys, 'plugin_runs', 0) + 1\n")
    monkeypatch.setattr(sys, "plugin_runs", 0, raising=False)
    monkeypatch.chdir(tmp_path)
    load_plugin("counted.py")
    load_plugin(str(plugin))
    assert vars(sys)["plugin_runs"] == 1


def test_a_plugin_that_was_imported_as_a_module_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "by_module_name.py").write_text("import sys\nsys.plugin_runs = getattr(sys, 'plugin_runs', 0) + 1\n")
    monkeypatch.setattr(sys, "plugin_runs", 0, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    load_plugin("by_module_name")
    load_plugin(str(tmp_path / "by_module_name.py"))
    assert vars(sys)["plugin_runs"] == 1


def test_the_running_script_may_name_itself(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    load = "load_plugin(__file__)\nload_plugin('script.py')\n"
    script.write_text(f"from trlx_like.registry import load_plugin\nprint('ran')\n{load}")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["ran"]


def test_a_module_that_is_there_but_lacks_another_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacks_another.py").write_text("import nil")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RegistryError, match="plugin 'lacks_another' raised ModuleNotFoundError on import: No module"):
        load_plugin("lacks_another")
