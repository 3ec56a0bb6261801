"""Experience, the data that trainers learn from, and the store that holds it between collecting and learning."""

from trlx_like.data.experience import Experience, padded
from trlx_like.data.preference import PreferenceExperience
from trlx_like.data.store import RolloutStore
from trlx_like.data.text import Completion, Sampled, padded_right

__all__ = ["Completion", "Experience", "PreferenceExperience", "RolloutStore", "Sampled", "padded", "padded_right"]
