"""Open a model directory and run it, with torch or with ONNX Runtime.
Evals measure it, and users of the library call it.
"""

from typing import TYPE_CHECKING

from optkit.session.opening import open_session
from optkit.session.torch_session import TorchSession

if TYPE_CHECKING:
    from optkit.session.onnx_session import OnnxSession as OnnxSession

__all__ = ["TorchSession", "open_session"]
