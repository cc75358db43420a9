"""Frozen parameters as one file, and what peft calls the tensors of an adapter."""
