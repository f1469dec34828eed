"""Open a model directory and run it, with torch or with ONNX Runtime.
Evals measure it, and users of the library call it.
"""

from optkit.session.opening import open_session
