"""Names, aliases, lazy entries and plugins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

from trlx_like.errors import RegistryError
from trlx_like.registry import Registry, load_plugin, nearest

Text = Callable[[], str]


@pytest.fixture
def registry() -> Registry[Text]:
    return Registry(
        "codec",
        {"Json": "json:dumps", "Pickle": "no_such_module_of_ours:dumps"},
        aliases={"AccelerateJson": "Json"},
        gone={"NeMo*": "use Json.", "Xml": "use Yaml."},
    )


def test_a_lazy_entry_is_imported_when_it_is_asked_for(registry: Registry[Text]) -> None:
    import json

    dumps: Any = json.dumps
    assert registry.get("json") is dumps
    assert registry.get("ACCELERATEJSON") is dumps
    assert registry.canonical("acceleratejson") == "Json"
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_ours"):
        registry.get("Pickle")


def test_the_three_forms_of_the_decorator(registry: Registry[Text]) -> None:
    @registry.register
    def Toml() -> str:
        return "toml"

    @registry.register("Yaml")
    def yaml_codec() -> str:
        return "yaml"

    @registry.register("Csv", aliases=["Tsv", "csv"])
    def csv_codec() -> str:
        return "csv"

    assert Toml() == "toml" and registry.get("toml") is Toml
    assert registry.get("yaml") is yaml_codec
    assert registry.get("tsv") is csv_codec
    assert registry.names() == ["Csv", "Json", "Pickle", "Toml", "Yaml"]
    assert "TSV" in registry and "yaml_codec" not in registry and 3 not in registry


def other() -> str:
    return ""


def test_a_taken_name_is_not_given_away(registry: Registry[Text]) -> None:
    with pytest.raises(RegistryError) as error:
        registry.register("JSON")(other)
    assert str(error.value) == f"the codec name 'JSON' is taken by json:dumps; give {__name__}:other another name."
    with pytest.raises(RegistryError, match="the codec name 'AccelerateJson' is taken by json:dumps"):
        registry.register("Bson", aliases=["AccelerateJson"])(other)
    assert "Bson" not in registry


def test_the_same_thing_registered_again_replaces_itself(registry: Registry[Text]) -> None:
    def make(answer: str) -> Text:
        @registry.register("Toml", aliases=["Ini"])
        def toml() -> str:
            return answer

        return toml

    make("first")
    make("second")
    assert registry.get("ini")() == "second"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Jsn", "unknown codec 'Jsn'. Did you mean Json? Known: Json, Pickle."),
        ("AccelrateJson", "unknown codec 'AccelrateJson'. Did you mean AccelerateJson? Known: Json, Pickle."),
        ("qqqq", "unknown codec 'qqqq'. Known: Json, Pickle."),
        ("NeMoJson", "codec 'NeMoJson' is not available: use Json."),
        ("xml", "codec 'xml' is not available: use Yaml."),
        (3, "the name of a codec is text, got 3."),
    ],
)
def test_unknown_names(registry: Registry[Text], name: str, sentence: str) -> None:
    with pytest.raises(RegistryError) as error:
        registry.get(name)
    assert str(error.value) == sentence


def test_an_empty_registry_says_so() -> None:
    with pytest.raises(RegistryError, match="unknown codec 'x'. Known: none."):
        Registry[Text]("codec").get("x")


def test_nearest() -> None:
    assert nearest("batch_sise", ["seed", "batch_size"]) == "batch_size"
    assert nearest("zzz", ["seed", "batch_size"]) is None


def test_an_installed_entry_point_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_of_an_entry_point.py").write_text("")
    info = tmp_path / "our_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: our-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trlx_like.plugins]\nours = module_of_an_entry_point\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    load_plugin("ours")
    assert "module_of_an_entry_point" in sys.modules


def test_an_entry_point_that_is_only_installed_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = []

    def entry_points(**wanted: Any) -> EntryPoints:
        looked_up.append(wanted)
        return EntryPoints([EntryPoint("other", "no_such_module_of_ours", "trlx_like.plugins")]).select(**wanted)

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    load_plugin("json")
    assert looked_up == [{"group": "trlx_like.plugins", "name": "json"}]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "no_such_module",
            "plugin 'no_such_module': no module or installed entry point 'no_such_module'; "
            "for a file give its path, ending in .py.",
        ),
        (
            "no_such.module",
            "plugin 'no_such.module': no module or installed entry point 'no_such'; "
            "for a file give its path, ending in .py.",
        ),
        ("{folder}/none.py", "plugin '{folder}/none.py': no such file: {folder}/none.py."),
        ("{folder}/bad.py", "plugin '{folder}/bad.py' raised ZeroDivisionError on import: division by zero"),
        ("{folder}/lacks.py", "plugin '{folder}/lacks.py' raised ModuleNotFoundError on import: No module"),
        ("{folder}/taken.py", "plugin '{folder}/taken.py': the method name 'PPOConfig' is taken by "),
        ("", "a plugin is a module, a .py file or an entry point name, got ''."),
    ],
)
def test_plugins_that_cannot_be_loaded(tmp_path: Path, name: str, sentence: str) -> None:
    (tmp_path / "bad.py").write_text("1 / 0")
    (tmp_path / "lacks.py").write_text("import nil")
    (tmp_path / "taken.py").write_text(
        "from trlx_like.config import MethodConfig, register_method\n"
        "@register_method\nclass PPOConfig(MethodConfig): ...\n"
    )
    for _ in range(2):  # a failure is not remembered as a success
        with pytest.raises(RegistryError) as error:
            load_plugin(name.format(folder=tmp_path))
        assert str(error.value).startswith(sentence.format(folder=tmp_path))
