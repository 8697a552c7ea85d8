"""Every difference between the supported versions of transformers, each with its reason."""

import transformers
from packaging.version import Version


VERSION = Version(transformers.__version__)

# 5.24 renamed the cache argument of model forwards and its field in outputs; our drafter takes both names.
CACHE = "cache" if VERSION >= Version("5.24.0.dev0") else "past_key_values"


def is_of_the_caller(cache) -> bool:
    """Whether a cache was given to `generate`, which marks it so, and may be used again."""
    return getattr(cache, "_is_user_defined", False)
