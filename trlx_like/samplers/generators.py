"""Former names of the sampling engines, for plugins that import them."""

from trlx_like.samplers.engines import (
    ENGINES as GENERATORS,
    Engine as Generator,
    TransformersEngine as TransformersGenerator,
    register_engine as register_generator,
)

__all__ = ["GENERATORS", "Generator", "TransformersGenerator", "register_generator"]
