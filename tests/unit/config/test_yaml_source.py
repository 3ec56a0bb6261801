"""YAML as people mean it, files that hold none, and `--set`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.support import VALID, errors_of, loaded
from trlx_like.config import TRLConfig
from trlx_like.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "x.yml: must be a mapping of sections (model, train, method, ...)."),
        (b"just words", "x.yml: must be a mapping of sections (model, train, method, ...)."),
        (b"- a\n- b", "x.yml: must be a mapping of sections (model, train, method, ...)."),
        (b"a: 1\n\xff", "x.yml: is not UTF-8 text (byte 5)."),
        (b"{a: 1", "x.yml:1: is not valid YAML: expected ',' or '}', but got '<stream end>'."),
        (
            b"a: \x07",
            "x.yml: is not valid YAML: unacceptable character #x0007: special characters are not allowed.",
        ),
        (b"---\na: 1\n---\nb: 1\n", "x.yml:3: is not valid YAML: but found another document."),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, sentence: str) -> None:
    assert errors_of(tmp_path, content) == [sentence]


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for path, sentence in (
        (tmp_path / "none.yml", f"there is no such file in {Path.cwd()}."),
        (tmp_path, "is a folder."),
    ):
        with pytest.raises(ConfigError) as error:
            TRLConfig.load_yaml(path)
        assert str(error.value) == f"{path}: {sentence}"


def test_yaml_is_read_as_people_mean_it(tmp_path: Path) -> None:
    text = VALID + (
        "  init_kl_coef: 1e-5\n  horizon: 10_000\n  whiten_rewards: True\n"
        "  gen_kwargs: {max_new_tokens: 0x10, do_sample: true}\n"
        "backend: {mixed_precision: no}\noptimizer: {name: sgd, kwargs: {lr: 1e-3, momentum: .9}}\n"
        "data: {stop_sequences: ['no', off, 2024-01-02]}\nsampler:\n"
    )
    config = loaded(tmp_path, "\ufeff" + text)
    assert config.method.to_dict()["init_kl_coef"] == 1e-5
    assert config.method.to_dict()["horizon"] == 10000
    assert config.method.to_dict()["gen_kwargs"] == {"max_new_tokens": 16, "do_sample": True}
    assert config.backend.mixed_precision == "no"
    assert config.optimizer.kwargs == {"lr": 0.001, "momentum": 0.9}
    assert config.data.stop_sequences == ["no", "off", "2024-01-02"]


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    text = "defaults: &d {epochs: 5, seed: 1}\n" + VALID.replace("  epochs: 2\n", "  <<: *d\n  seed: 2\n")
    assert errors_of(tmp_path, text)[0].startswith("x.yml:1: defaults: unknown section.")
    config = loaded(tmp_path, VALID.replace("  epochs: 2\n", "  <<: [{epochs: 5, seed: 1}, {epochs: 6}]\n  seed: 2\n"))
    assert (config.train.epochs, config.train.seed) == (5, 2)


def test_overrides_of_the_command_line(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        VALID.replace("epochs: 2", "epochs: x"),
        *("train.epochs=3", "train.run_name=", "method.gen_kwargs={max_new_tokens: 4}"),
        *(
            "method.gen_kwargs.temperature=7e-1",
            "backend.mixed_precision=no",
            "data.reward_fn=module:function",
        ),
        "train.checkpoint_dir=a=b",
    )
    assert (config.train.epochs, config.train.run_name, config.train.checkpoint_dir) == (3, None, "a=b")
    assert config.method.to_dict()["gen_kwargs"] == {"max_new_tokens": 4, "temperature": 0.7}
    assert (config.backend.mixed_precision, config.data.reward_fn) == ("no", "module:function")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.batch_sise=4", "--set: train.batch_sise: unknown key. Did you mean train.batch_size?"),
        ("train.epochs=x", "--set: train.epochs: must be a whole number of at least 1, got 'x'."),
        (
            "train.epochs=!!set {}",
            "--set: train.epochs: the YAML tag !!set is not allowed; write a plain value.",
        ),
        ("train.epochs", "--set train.epochs: must be key=value, for example train.seed=1."),
        ("=3", "--set =3: must be key=value, for example train.seed=1."),
        ("train..epochs=3", "--set train..epochs=3: must be key=value, for example train.seed=1."),
        ("train.epochs.x=3", "--set train.epochs.x=3: train.epochs is not a mapping."),
        (
            "train.tags=[a",
            "--set train.tags=[a: is not valid YAML: expected ',' or ']', but got '<stream end>'.",
        ),
        ("trian.epochs=3", "--set: trian: unknown section. Did you mean train?"),
    ],
)
def test_errors_of_overrides(tmp_path: Path, override: str, sentence: str) -> None:
    assert errors_of(tmp_path, VALID, override) == [sentence]
