"""The file of a sweep: mistakes by file and line, files of trlX, and options checked before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.cli_support import TOKENS, TRAIN, write_yaml
from trlx_like.errors import ConfigError
from trlx_like.sweep.spec import Range, check_points, read_sweep

GOOD = "config: run.yml\noptions:\n  optimizer.kwargs.lr: {low: 1.0e-5, high: 1.0e-3, log: true}\n"


def written(folder: Path, text: str) -> Path:
    (folder / "sweep.yml").write_text(text)
    return folder / "sweep.yml"


def test_a_file_that_is_right(tmp_path: Path) -> None:
    spec, notes = read_sweep(written(tmp_path, GOOD))
    assert (spec.search, spec.trials, spec.parallel, spec.folder, notes) == ("tpe", 20, 1, "sweeps/sweep", [])
    assert spec.spaces == {"optimizer.kwargs.lr": Range(low=1e-5, high=1e-3, log=True)}
    assert read_sweep(tmp_path / "sweep.yml", Path("other.yml"))[0].config == "other.yml"


def test_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[3]
    monkeypatch.chdir(root)
    file = Path("configs/sweeps/learning_rate.yml")
    assert check_points(file, read_sweep(file)[0], [], [])["train"]["trainer"] == "PPOTrainer"
    lines = Path("configs/sweeps/learning_rate.yml").read_text().splitlines()
    shown = "\n".join(line for line in lines if not line.startswith("#"))
    assert shown in (root / "docs" / "sweeps.md").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD + "metrik: a\n", r"sweep\.yml:4: metrik: unknown key\. Did you mean metric\?"),
        (GOOD + "search: bayes\n", "4: search: must be 'tpe', 'random' or 'grid', got 'bayes'"),
        (GOOD + "trials: 0\n", "4: trials: must be a whole number of at least 1, got 0"),
        (GOOD + "seeds: [1, 1]\n", r"4: seeds: \[1, 1\] names a seed twice"),
        (GOOD + "seeds: []\n", "4: seeds: must be"),
        (GOOD + "search: grid\n", r"3: options\.optimizer\.kwargs\.lr: must be a list of values for the search grid"),
        (GOOD + "halving: {factor: 3}\n", r"4: halving\.first: missing"),
        (GOOD + "halving: {first: 2, factor: 1}\n", r"halving\.factor: must be a whole number of at least 2, got 1"),
        (GOOD + "  a.b: {low: 2, high: 1}\n", r"4: options\.a\.b\.low: \(2\) must be below high \(1\)"),
        (GOOD + "  a.b: {low: 0, high: 1, log: true}\n", r"a\.b\.low: \(0\) must be above 0 with log"),
        (GOOD + "  a.b: {low: 0, high: 3, step: 0.5}\n", r"a\.b\.step: \(0\.5\) must be above 0, whole"),
        (GOOD + "  a.b: {lov: 0, high: 3}\n", r"a\.b\.lov: unknown key\. Did you mean low\?"),
        (GOOD + "  a.b: 3\n", r"4: options\.a\.b: must be a list of values or a mapping with low and high, got 3"),
        (GOOD + "  train.seed: [1]\n", r"train\.seed: belongs to the sweep; use seeds"),
        ("config: run.yml\n", "options: missing"),
        ("config: run.yml\noptions: {}\n", "2: options: must name at least one option"),
        ("options: {a.b: [1]}\n", "config: missing"),
    ],
)
def test_mistakes(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_sweep(written(tmp_path, text))


def test_options_are_checked_before_anything_runs(tmp_path: Path) -> None:
    run = write_yaml(
        tmp_path / "run.yml",
        model={"model_path": "no/model"},
        train={**TRAIN, "trainer": "PPOTrainer"},
        method={"name": "PPOConfig", "gen_kwargs": TOKENS},
    )

    def checked(text: str, *overrides: str) -> dict[str, Any]:
        file = written(tmp_path, text)
        return check_points(file, read_sweep(file, run)[0], overrides, [])

    with pytest.raises(ConfigError) as error:
        checked("options:\n  method.cliprang: [0.1]\n  method.gamma: {low: 0.5, high: 1.5}\n  train.seed_: [1]")
    assert [line.partition("sweep.yml:")[2] for line in str(error.value).splitlines()] == [
        "2: options.method.cliprang: (0.1) unknown key. Did you mean method.cliprange?",
        "3: options.method.gamma: (1.5) must be a number from 0 to 1, got 1.5.",
        "4: options.train.seed_: (1) unknown key. Did you mean train.seed?",
    ]
    with pytest.raises(ConfigError, match=r"sweep\.yml:2: options\.optimizer\.kwargs\.lrr: \(0\.1\) .* argument 'lrr'"):
        checked("options:\n  optimizer.kwargs.lrr: [0.1]")
    with pytest.raises(ConfigError, match=r"sweep\.yml:2: lr_init: \(0\.1\) unknown section"):
        checked("tune_config: {}\nlr_init: {strategy: uniform, values: [0.1, 0.2]}")
    with pytest.raises(ConfigError, match=r"^--set: train\.sede: unknown key"):
        checked("options: {method.gamma: [0.9]}", "train.sede=3")
    values = checked("options: {method.gen_kwargs.top_k: [5, 6]}", "train.seed=3")
    assert (values["train"]["seed"], "top_k" in values["method"]["gen_kwargs"]) == (3, False)


def test_a_file_of_trlx(tmp_path: Path) -> None:
    text = """
tune_config: {mode: min, metric: losses/loss, search_alg: bayesopt, num_samples: 32}
init_kl_coef: {strategy: uniform, values: [0, 0.2]}
optimizer.kwargs.lr: {strategy: loguniform, values: [1.0e-6, 1.0e-3]}
"""
    spec, notes = read_sweep(written(tmp_path, text), Path("run.yml"))
    assert (spec.metric, spec.mode, spec.search, spec.trials, notes) == ("losses/loss", "min", "tpe", 32, [])
    assert spec.spaces["init_kl_coef"] == Range(low=0.0, high=0.2)
