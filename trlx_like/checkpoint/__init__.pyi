from trlx_like.checkpoint.manifest import MANIFEST as MANIFEST
from trlx_like.checkpoint.rng import (
    RngState as RngState,
    isolated_rng as isolated_rng,
    rng_state as rng_state,
    seed_everything as seed_everything,
    set_rng_state as set_rng_state,
)
from trlx_like.checkpoint.state import (
    Fields as Fields,
    Stateful as Stateful,
    TrainState as TrainState,
    fields as fields,
)
from trlx_like.checkpoint.store import CheckpointStore as CheckpointStore
from trlx_like.checkpoint.tree import load_tree as load_tree, save_tree as save_tree
