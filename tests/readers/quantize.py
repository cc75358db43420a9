"""TensorFlow's post-training quantizer over one of our TFLite files, for tests/benches/quantization.py.

    python quantize.py FOLDER     reads a.tflite and x.npz (calibration samples), writes b.tflite

Weights and activations are int8 there, x and logits float32.

Runs where only tensorflow and numpy are installed, so it imports nothing of ours.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.lite.python.optimize.calibrator import Calibrator


def main(folder: Path) -> None:
    """Calibrate, then quantize weights per channel and activations per tensor."""
    x = np.load(folder / "x.npz")["x"]
    tool = Calibrator((folder / "a.tflite").read_bytes())
    made = tool.calibrate_and_quantize(lambda: ([row[np.newaxis]] for row in x), tf.float32, tf.float32, True)  # noqa: FBT003 - what has no int8 kernel stays in float32
    (folder / "b.tflite").write_bytes(made)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
