"""Reading a stranger's file: what it says is shown, and nothing that it names is imported or run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.cli_support import said, write_yaml
from trlx_like.config import TRLConfig
from trlx_like.config.commented import read_only
from trlx_like.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
PLUGINS = ["evil.py", "evil_module", "evil_entry_point"]
METHOD = {"name": "PPOConfig", "gen_kwargs": {"max_new_tokens": 4}}
TRAIN = {"total_steps": 1, "epochs": 1, "batch_size": 4, "trainer": "PPOTrainer"}
STRANGERS: dict[str, Any] = {
    "model": {"model_path": "evil:model", "model_extra_configs": {"token": "hf_0123456789abcdefghij"}},
    "tokenizer": {"tokenizer_path": "evil.py:tokenizer"},
    "method": METHOD,
    "train": TRAIN,
    "data": {
        "prompts": "evil:prompts",
        "reward_fn": ["evil.py:score", "a/folder"],
        "judge": {"name": "evil:Judge"},
        "metric_fn": "evil:metric",
        "eval_prompts": ["evil:this_is_text"],
    },
}
NAMES = {
    "model.model_path": "evil:model",
    "tokenizer.tokenizer_path": "evil.py:tokenizer",
    "data.prompts": "evil:prompts",
    "data.reward_fn.0": "evil.py:score",
    "data.judge.name": "evil:Judge",
    "data.metric_fn": "evil:metric",
    **{f"plugins.{place}": name for place, name in enumerate(PLUGINS)},
}
# Whatever a process opens for writing, starts, connects to or runs from a folder is an event of Python's auditing.
WATCHED = """
import json, os, sys
here, seen = os.getcwd(), []
def watch(event, arguments):
    if event == "exec" and str(getattr(arguments[0], "co_filename", "")).startswith(here):
        seen.append([event, arguments[0].co_filename])
    elif event in ("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.posix_spawn", "socket.connect"):
        seen.append([event, repr(arguments)])
    elif event == "open" and isinstance(arguments[0], str) and os.path.abspath(arguments[0]).startswith(here) \\
            and os.path.exists(arguments[0]):
        seen.append([event, os.path.basename(arguments[0])])
sys.addaudithook(watch)
from trlx_like.cli import main
sys.argv = ["trlx-like", *sys.argv[1:]]
try:
    main()
finally:
    print(json.dumps(seen), file=sys.stderr)
"""


def show(folder: Path, *words: str) -> tuple[str, list[list[str]]]:
    command = [sys.executable, "-P", "-c", WATCHED, "show-config", *words]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=False
    )
    return done.stdout, json.loads(done.stderr.splitlines()[-1])


def test_nothing_of_a_strangers_folder_is_run(tmp_path: Path) -> None:
    """Nor are files there that have the names of packages which the command imports."""
    file = write_yaml(tmp_path / "stranger.yml", **STRANGERS)
    file.write_text(file.read_text() + yaml.safe_dump({"plugins": PLUGINS}))
    for name in ("evil", "evil_module", "torch", "ast", "inspect", "colorsys", "rich"):
        (tmp_path / f"{name}.py").write_text("print('run')\n")
    text, seen = show(tmp_path, "--no-plugins", "stranger.yml", "--set", "train.seed=7")
    head = [line for line in text.splitlines() if line.startswith("# Names code")]
    assert sorted(head) == sorted(f"# Names code: {option}: {name}" for option, name in NAMES.items())
    shown = yaml.safe_load(text)
    assert shown["train"]["seed"] == 7 and shown["plugins"] == PLUGINS
    assert shown["model"]["model_extra_configs"] == {"token": "<redacted>"}
    assert "  # Number of optimizer steps after which training stops.\n  total_steps: 1\n" in text
    assert {tuple(event) for event in seen} == {("open", "stranger.yml")}
    # The same look at the plugins of a file, with them.
    _, seen = show(tmp_path, "stranger.yml")
    assert ["exec", str(tmp_path / "evil.py")] in seen


def test_a_file_that_needs_its_plugin_is_shown_as_it_is_written(tmp_path: Path) -> None:
    method = {"name": "EvilConfig", "api_key": "opensesame"}
    file = write_yaml(tmp_path / "x.yml", model={"model_path": "m"}, method=method, train=TRAIN)
    file.write_text(file.read_text() + "plugins: [evil.py]\n")
    text = read_only(file)
    assert text.splitlines()[0] == "# Names code: plugins.0: evil.py"
    assert text.splitlines()[1].startswith(f"# Not complete: {file}:3: method.name: unknown method 'EvilConfig'.")
    assert yaml.safe_load(text)["method"] == {"name": "EvilConfig", "api_key": "<redacted>"}


def test_what_cannot_be_read_is_an_error(here: Path) -> None:
    Path("x.yml").write_text("a: [")
    assert said(2, "show-config", "--no-plugins", "x.yml").startswith("x.yml:1: is not valid YAML")
    file = write_yaml(here / "y.yml", model={"model_path": "m"}, method=METHOD, train=TRAIN)
    file.write_text("plugins: 3\n" + file.read_text())
    assert f"# Not complete: {file}:1: plugins: must be a list of texts, got 3.\n" in read_only(file)
    with pytest.raises(ConfigError, match="no such file"):
        read_only("z.yml")
    message = "--no-plugins and --plugin exclude each other.\n"
    assert said(2, "show-config", "--no-plugins", "--plugin", "x.py", "ppo") == message
    assert said(0, "show-config", "--no-plugins", "ppo") == said(0, "show-config", "ppo")


def test_code_of_a_model_is_allowed_on_the_command_line_only(tmp_path: Path) -> None:
    extra = {"trust_remote_code": True, "allow_all_kernels": False}
    options: dict[str, Any] = {"method": METHOD, "train": {**TRAIN, "checkpoint_dir": str(tmp_path)}}
    file = write_yaml(tmp_path / "x.yml", model={"model_path": "m", "model_extra_configs": extra}, **options)
    with pytest.raises(ConfigError) as refused:
        TRLConfig.load_yaml(file)
    option = "model.model_extra_configs.trust_remote_code"
    assert str(refused.value) == (
        f"{file}:{file.read_text().splitlines().index('    trust_remote_code: true') + 1}: {option}: runs code that "
        "comes with the model, so it is not taken from a file. If you trust the model's author, add to the command: "
        f"--set {option}=true"
    )
    config = TRLConfig.load_yaml(file, [f"{option}=true"])
    assert config.model.model_extra_configs == extra
    config.dump_yaml(file)
    with pytest.raises(ConfigError, match="not taken from a file"):
        TRLConfig.load_yaml(file, ["train.seed=1"])
    assert TRLConfig.load_yaml(file, [f"{option}=false"]).model.model_extra_configs[option.rpartition(".")[2]] is False
    for key, value in (("custom_pipeline", "someone/evil"), ("allow_all_kernels", True)):
        file = write_yaml(tmp_path / "x.yml", model={"model_path": "m", "model_extra_configs": {key: value}}, **options)
        with pytest.raises(ConfigError, match=rf"--set model.model_extra_configs.{key}={str(value).lower()}$"):
            TRLConfig.load_yaml(file)
    file.write_text("x: &x {trust_remote_code: true}\n" + yaml.safe_dump({"tokenizer": 1}).replace("1", "{<<: *x}"))
    with pytest.raises(ConfigError, match="tokenizer.trust_remote_code: runs code"):
        TRLConfig.load_yaml(file)
