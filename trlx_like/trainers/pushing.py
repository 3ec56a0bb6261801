"""The upload of a finished run: `train.push_to_hub`."""

from __future__ import annotations

import logging
from typing import Any

from trlx_like.sharing.hub import push
from trlx_like.trainers.callbacks import Callback

logger = logging.getLogger(__name__)


class PushToHub(Callback):
    """Upload the run when its training ends, into a repository that is private if it is new."""

    def on_train_end(self, trainer: Any) -> None:
        if trainer.world.main:
            repo, run = trainer.config.train.push_to_hub, trainer.run.folder.directory
            try:
                logger.info("%s", push(run, repo, private=True)[0])
            except Exception as error:  # whatever a network or a library does: the run is complete and on the disk
                logger.warning("%s Do it again with: trlx-like push %s %s --private", error, run, repo)
