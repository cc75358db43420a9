"""What to do about a program that differs from torch, or whose numbers are not finite."""
