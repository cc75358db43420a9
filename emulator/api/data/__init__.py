"""Samples in: the user's own from other libraries, the known data sets, and how devices share them."""
