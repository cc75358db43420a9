"""Passes over a traced graph: writes in place become plain operators, and what is computed twice is computed once."""
