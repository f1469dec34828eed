"""Open a model directory and run it with torch: what evals measure and what users of the library call."""

from optkit.session.opening import open_session
from optkit.session.torch_session import TorchSession

__all__ = ["TorchSession", "open_session"]
