"""Run a script of fluke's in `.peers/fluke`: python tests/benches/peers/fluke_script.py SCRIPT.

fluke needs torchvision. Its wheel is built for CUDA, and beside torch for the CPU its import fails for want of two
operators, which are declared here. fluke does not call them.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
sys.path.insert(0, str(Path(sys.argv[1]).resolve().parent))
runpy.run_path(sys.argv[1], run_name="__main__")
