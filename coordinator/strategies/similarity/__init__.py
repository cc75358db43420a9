"""Methods that cluster devices by how similar their updates are: in a tree, or once for all rounds."""
