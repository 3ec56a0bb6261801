"""The position of a run is in its checkpoints."""

from __future__ import annotations

from trlx_like.trainers.progress import Progress


def test_progress_round_trips() -> None:
    progress = Progress(step=3, round=2, position=1, in_round=True, best=0.5, tracker={"wandb": "x"})
    other = Progress()
    other.load_state_dict(progress.state_dict())
    assert other == progress
