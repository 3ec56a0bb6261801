"""The configurations of the examples, loaded from any folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.configurations import ROOT, load
from examples.randomwalks.start import train_start
from trlx_like import TRLConfig

NAMES = sorted(file.stem for file in (ROOT / "configs").glob("*.yml") if file.stem != "plugin_reinforce")


def flat(value: object, prefix: str = "") -> dict[str, object]:
    if not isinstance(value, dict):
        return {prefix: value}
    return {name: leaf for key, item in value.items() for name, leaf in flat(item, f"{prefix}.{key}").items()}


@pytest.mark.parametrize("name", NAMES)
def test_only_the_places_of_files_differ_from_what_is_written(name: str, here: Path) -> None:
    written = flat(TRLConfig.load_yaml(ROOT / "configs" / f"{name}.yml").to_dict())
    located = flat(load(name).to_dict())
    assert written.keys() == located.keys()
    for option in [option for option, value in written.items() if value != located[option]]:
        assert located[option] == str(ROOT / str(written[option]))
        assert Path(str(located[option]).partition(":")[0]).is_file()


def test_a_run_from_another_folder(here: Path) -> None:
    trainer = train_start(total_steps=1, epochs=1)
    assert trainer.progress.step == 1
    assert [path.name for path in here.iterdir()] == ["runs"]
