"""What a program minimises: losses of samples and positions, and the user's own."""
