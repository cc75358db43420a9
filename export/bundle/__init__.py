"""Trained centers as files: written, signed, read, verified, quantized."""
