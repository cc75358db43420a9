"""Secure aggregation: the parts that both sides share, from masks and shares to the bytes of its messages."""
