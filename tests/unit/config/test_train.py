"""What the section `train` may say, and the sentence for everything it may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config.support import VALID, errors_of

# A setting that is added to the file, and the sentence about it.
TRAIN = {
    "batch_sise: 8": "batch_sise: unknown key. Did you mean train.batch_size?",
    "num_rollouts: 8": "num_rollouts: unknown key. Did you mean method.num_rollouts?",
    "keep_checkpoints: 0": "keep_checkpoints: must be a whole number of at least 1 or null, got 0.",
    "seed: -1": "seed: must be a whole number from 0 to 4294967295, got -1.",
    "seed: 2.0": "seed: must be a whole number from 0 to 4294967295, got 2.0.",
    "seed: true": "seed: must be a whole number from 0 to 4294967295, got true.",
    "seed: '2'": "seed: must be a whole number from 0 to 4294967295, got '2'.",
    "seed: [1]": "seed: must be a whole number from 0 to 4294967295, got [1].",
    "seed:": "seed: must be a whole number from 0 to 4294967295, got null.",
    "seed: !!python/tuple [1]": "seed: the YAML tag !!python/tuple is not allowed; write a plain value.",
    "seed: !mine 1": "seed: the YAML tag !mine is not allowed; write a plain value.",
    "seed: !!int two": "seed: 'two' is not of the type int that it is tagged with.",
    "seed: &a [*a]": "seed.0: contains itself.",
    "minibatch_size: 3": "minibatch_size: 3 does not divide train.batch_size (8).",
    "max_grad_norm: 0": "max_grad_norm: must be a number above 0 or null, got 0.",
    "max_grad_norm: .nan": "max_grad_norm: must be a number above 0 or null, got nan.",
    "group_name: 7": "group_name: must be text or null, got 7.",
    "max_grad_norm: none": ("max_grad_norm: must be a number above 0 or null, got 'none'. Write null for no value."),
    "tags: [a, 1]": "tags: must be a list of texts, got ['a', 1].",
    "tracker: 3": "tracker: must be text, a list of texts or null, got 3.",
    "tracker_kwargs: {wandb: {notes: a try}}": "tracker_kwargs.wandb: train.tracker (None) does not name it.",
    "save_best: no": "save_best: must be true or false, got 'no'.",
    "logging_dir: 7": "logging_dir: must be text or null, got 7.",
    "trainer_kwargs: 1": "trainer_kwargs: must be a mapping of settings, got 1.",
    "1: 2": "1: a key must be text.",
}


@pytest.mark.parametrize(("setting", "sentence"), TRAIN.items())
def test_errors_of_train(tmp_path: Path, setting: str, sentence: str) -> None:
    text = VALID.replace("train:\n", f"train:\n  {setting}\n")
    assert errors_of(tmp_path, text) == [f"x.yml:4: train.{sentence}"]
