"""The JSON Schema of YAML files: it takes what `TRLConfig` takes, and refuses the mistakes that people make."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from trlx_like.config import METHODS, ModelConfig, TRLConfig
from trlx_like.config.schema import meanings
from trlx_like.config.yaml_source import YamlSource
from trlx_like.presets import PRESETS, default_dpo_config, default_ppo_config

ROOT = Path(__file__).parents[3]
FILE = ROOT / "configs" / "trlx_like.schema.json"
SCHEMA = json.loads(FILE.read_text(encoding="utf-8"))
CONFIGS = sorted((ROOT / "configs").glob("*.yml"))


def mistakes(values: dict[str, Any]) -> list[str]:
    """The dotted places of what the schema refuses."""
    return [".".join(map(str, error.absolute_path)) for error in Draft7Validator(SCHEMA).iter_errors(values)]


def test_the_file_beside_the_configurations_is_what_the_command_prints() -> None:
    # In a process of its own: other tests register methods.
    command = [sys.executable, "-m", "trlx_like", "schema"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True).stdout
    assert FILE.read_text(encoding="utf-8") == made, "run: trlx-like schema > configs/trlx_like.schema.json"
    Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_our_configurations_are_valid_and_name_the_schema(file: Path) -> None:
    assert mistakes(YamlSource(file).values) == []
    first, _, name = file.read_text(encoding="utf-8").split("\n")[0].partition("$schema=")
    assert first == "# yaml-language-server: " and (file.parent / name).samefile(FILE)


@pytest.mark.parametrize("name", PRESETS)
def test_every_option_of_a_preset_is_valid(name: str, tmp_path: Path) -> None:
    PRESETS[name]().dump_yaml(tmp_path / "x.yml")
    assert mistakes(YamlSource(tmp_path / "x.yml").values) == []


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"trian": {}}, ""),
        ({"train": {"eval_intervall": 5}}, "train"),
        ({"train": {"batch_size": "many"}}, "train.batch_size"),
        ({"train": {"batch_size": 0}}, "train.batch_size"),
        ({"train": {"trainer": "PPOTraner"}}, "train.trainer"),
        ({"model": {"model_arch_type": "casual"}}, "model.model_arch_type"),
        ({"model": {"model_path": 5}}, "model.model_path"),
        ({"optimizer": {"name": "adamv"}}, "optimizer.name"),
        ({"method": {"name": "PPO"}}, "method.name"),
        ({"method": {"lamb": 0.9}}, "method"),
        ({"method": {"tau": 0.9}}, "method"),  # an option of ILQL
        ({"method": {"lam": 1.5}}, "method.lam"),
        ({"method": {"kl_penalty": "k3"}}, "method.kl_penalty"),
        ({"method": {"gen_kwargs": {"max_time": 1.0}}}, "method.gen_kwargs"),
        ({"method": {"gen_kwargs": {"temprature": 1.0}}}, "method.gen_kwargs"),
        ({"method": {"gen_experience_kwargs": {"max_new_tokens": 4, "num_beams": 5}}}, "method.gen_experience_kwargs"),
    ],
)
def test_a_mistake_is_found_at_its_place(changes: dict[str, dict[str, Any]], place: str) -> None:
    values = json.loads(str(default_ppo_config()))
    for section, options in changes.items():
        values[section] = {**values.get(section, {}), **options}
    assert mistakes(values) == [place]
    with_plugin = {**values, "plugins": ["mine.py"]}
    assert mistakes(with_plugin) == ([] if place.endswith("name") or place == "train.trainer" else [place])


@pytest.mark.parametrize(
    ("loss", "valid"), [("ipo", True), (["ipo", "sft"], True), ("ipoo", False), ([], False), (["ipoo"], False)]
)
def test_losses_of_dpo_may_be_one_or_several(loss: Any, valid: bool) -> None:
    values = json.loads(str(default_dpo_config()))
    values["method"]["loss_type"] = loss
    assert mistakes(values) == ([] if valid else ["method.loss_type"])


def test_sections_may_be_left_out_but_not_what_a_run_needs() -> None:
    values = {"model": {"model_path": "a"}, "method": {"name": "SFTConfig"}, "train": {"trainer": "SFTTrainer"}}
    assert mistakes(values) == ["train"] * 3  # total_steps, epochs, batch_size
    assert mistakes({}) == [""] * 3


def test_every_option_has_a_description_and_optional_ones_their_default() -> None:
    kinds = {kind.__name__: kind for kind in [*TRLConfig.sections().values(), *map(METHODS.get, METHODS.names())]}
    for name, section in SCHEMA["definitions"].items():
        if name not in kinds:  # generation options
            continue
        for option, said in section["properties"].items():
            required = kinds[name].model_fields[option].is_required()
            assert said["description"] and ("default" in said) != required, f"{name}.{option}"
    assert (
        SCHEMA["definitions"]["ModelConfig"]["properties"]["ref_model_path"]["description"]
        == (meanings(ModelConfig)["ref_model_path"])
    )
