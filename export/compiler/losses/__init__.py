"""What a program minimises: losses of samples and positions, the user's own, and the output that they read."""
