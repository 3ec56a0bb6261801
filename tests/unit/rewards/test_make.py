"""What may be a reward function."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.contract.recipes import count_letters
from tests.tiny import tiny_config, tiny_tokenizer
from tests.unit.models.test_reward_model import sharp
from tests.unit.rewards.support import score
from tests.unit.rewards.test_models import OUTPUTS, PROMPTS, call
from tests.unit.rewards.test_weighted import length
from trlx_like.config import RewardFnConfig
from trlx_like.errors import ConfigError
from trlx_like.rewards.make import check_reward, make_reward
from trlx_like.rewards.models import RewardModel
from trlx_like.rewards.runner import RewardRunner
from trlx_like.rewards.weighted import WeightedRewards


def test_every_form(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def score(outputs, **_):\n    return [2.0 for _ in outputs]\n")
    model = sharp(tiny_config())
    model.save_pretrained(tmp_path / "judge")
    tiny_tokenizer().save_pretrained(tmp_path / "judge")
    expected = call(RewardModel(model, tiny_tokenizer()))
    loaded = RewardModel(tmp_path / "judge").network.lm
    place = f"{tmp_path / 'own.py'}:score"
    for form in (tmp_path / "judge", str(tmp_path / "judge"), RewardModel(tmp_path / "judge"), loaded):
        assert call(make_reward(form)) == pytest.approx(expected)
    assert call(make_reward("repetition")) == call(make_reward({"name": "repetition"}))
    assert check_reward(["repetition", place], "x") == f"repetition, {place}"
    assert make_reward(length) is length and call(make_reward(place)) == [2.0] * 5
    several = make_reward([place, length, tmp_path / "judge"], [0.5, 2, 0])
    assert isinstance(several, WeightedRewards) and several.names == ["score", "length", "judge"]
    assert call(several) == pytest.approx([29, 3, 7, 1, 141])
    assert make_reward(several) is several


@pytest.mark.parametrize(
    ("spec", "weights", "message"),
    [
        (3, None, r"^x must be a function, a reward model, .* or a list of these, not 3\.$"),
        ([length, None], None, r"^x\[1\] must be a function"),
        ([length, "nowhere.py:f"], None, r"^x\[1\] \('nowhere\.py:f'\): there is no file nowhere\.py"),
        ([], None, "^x must be a list of at least one function"),
        ([length], [1.0, 2.0], "reward.weights have one for each: 1 functions, 2 weights"),
        (length, [1.0], r"^reward\.weights \(\[1\.0\]\) needs a list of functions as x\. It is one function\.$"),
        (WeightedRewards([length]), [1.0], "It has weights of its own"),
    ],
    ids=["number", "in a list", "no file", "empty", "weights", "one", "both"],
)
def test_what_is_no_reward_function(spec: Any, weights: list[float] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_reward(spec, weights, "x")


def test_a_reward_model_in_another_process_is_the_same(tmp_path: Path) -> None:
    """Loaded from its folder again, or sent as it is."""
    model = sharp(tiny_config())
    model.save_pretrained(tmp_path / "judge")
    tiny_tokenizer().save_pretrained(tmp_path / "judge")
    texts: dict[str, Any] = {"prompts": PROMPTS, "outputs": OUTPUTS}
    for form in (RewardModel(tmp_path / "judge", batch_size=2), RewardModel(model, tiny_tokenizer(), max_length=8)):
        copy = pickle.loads(pickle.dumps(form))
        assert (copy.batch_size, copy.max_length) == (form.batch_size, form.max_length)
        assert copy(**texts) == form(**texts)
    runner = RewardRunner(RewardModel(tmp_path / "judge"), RewardFnConfig(workers=1))
    assert score(runner, texts, [{}] * 5).rewards == RewardModel(tmp_path / "judge")(**texts)
    runner.close()


def test_functions_are_still_functions() -> None:
    assert call(count_letters) == pytest.approx([1.6, -0.1, 0.7, 0.0, -7.0])
