"""ONNX models: made, read, run and compared; below the stages and sessions that use them."""
