"""What to do about a program that differs from torch."""
