"""The torch models that the papers and the demo use; a user's own comes by import path."""
