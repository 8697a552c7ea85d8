"""Every difference between the supported versions of transformers, each with its reason."""

import transformers
from packaging.version import Version
from transformers import cache_utils
from transformers.generation import utils


VERSION = Version(transformers.__version__)

# 5.24 renamed the cache argument of model forwards and its field in outputs; our drafter takes both names.
CACHE = "cache" if VERSION >= Version("5.24.0.dev0") else "past_key_values"


# 5.24 gives layers without any cache one of their own kind; before, they have that of a recurrent layer, unused.
DUMMY_LAYERS = tuple(getattr(cache_utils, name) for name in ("DummyLayer",) if hasattr(cache_utils, name))


# Inputs beside the text (images, sound) that `generate` hands to the forward of the prompt alone.
PROMPT_ONLY = {
    *getattr(utils, "MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL", ()),
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
}
# What says of each token of the text whether it stands for an image, which `generate` goes on with.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


def is_of_the_caller(cache) -> bool:
    """Whether a cache was given to `generate`, which marks it so, and may be used again."""
    return getattr(cache, "_is_user_defined", False)
