"""One file format per module: .onnx, .tflite and .pt2."""
