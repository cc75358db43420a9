"""One training runtime per file, imported inside; base.py says what an engine promises."""
