"""optkit optimizes Hugging Face language models by recipe.
It proves what that cost and what it bought.

scorecard = optkit.run("recipes/llama_int4.yaml", model="smollm2-135m")
session = optkit.open_artifact("artifacts/llama_int4")
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optkit.comparison import compare as compare
    from optkit.errors import OptkitError as OptkitError
    from optkit.pipeline import evaluate as evaluate
    from optkit.pipeline import open_artifact as open_artifact
    from optkit.pipeline import run as run
    from optkit.pipeline import verify as verify
    from optkit.recipe.recipe import load_recipe as load_recipe

if find_spec("fcntl") is None:
    raise ImportError(
        "optkit runs on Linux and macOS. This system has no `fcntl`, by which runs keep out of each "
        "other's way. On Windows use WSL.",
        name="fcntl",
    )
__version__ = "0.1.0"

_HOMES = {
    "OptkitError": "optkit.errors",
    "compare": "optkit.comparison",
    "evaluate": "optkit.pipeline",
    "load_recipe": "optkit.recipe.recipe",
    "open_artifact": "optkit.pipeline",
    "run": "optkit.pipeline",
    "verify": "optkit.pipeline",
}
__all__ = ["OptkitError", "__version__", "compare", "evaluate", "load_recipe", "open_artifact", "run", "verify"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'optkit' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
