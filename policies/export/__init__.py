"""Export to ONNX, whole or step by step, and the exported folder."""
