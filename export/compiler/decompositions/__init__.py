"""Operators in terms of simpler ones that every runtime has, with gradients."""
