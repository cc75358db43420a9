"""Runs that wait for no device: their options, and the state machine with a buffer for each center."""
