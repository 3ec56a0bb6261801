"""The example that trains a reward adapter and a policy adapter on one base learns what its page says."""

from __future__ import annotations

from pathlib import Path

from examples import reward_adapter


def test_ppo_learns_from_a_reward_adapter_on_its_own_base(tmp_path: Path) -> None:
    accuracy, history = reward_adapter.main(["--rounds", "6", "--directory", str(tmp_path)])
    assert accuracy > 0.85  # a reward model that guesses has 0.5
    (first_reward, first_vowels), (last_reward, last_vowels) = history[0], history[-1]
    assert first_vowels < 1.8  # 3 of 10 letters, and at most 6 letters
    assert last_vowels > first_vowels + 1 and last_reward > first_reward + 1
    assert not (tmp_path / "reward" / "adapter" / "model.safetensors").exists()  # the adapter alone was saved
