"""Options of GRPO, by the names of TRL's GRPOTrainer."""

from __future__ import annotations

from typing import Literal

from trlx_like.config.methods.groups import GroupMethodConfig
from trlx_like.config.resume import Applied


class GRPOConfig(GroupMethodConfig):
    """Group relative policy optimisation (Shao et al. 2024), with the changes of Dr. GRPO, DAPO and GSPO as options."""

    scale_rewards: Applied[Literal["group", "batch", "none"]] = "group"
    """Divide scores by their standard deviation in the group or in the round (batch) before a KL is subtracted."""
