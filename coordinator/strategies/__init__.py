"""One method per file; base.py says what a method is."""
