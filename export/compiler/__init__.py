"""A torch model becomes a training program: tracing, decompositions, parity."""
