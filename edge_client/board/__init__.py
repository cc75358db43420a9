"""Installation on a board: profiles, the list of files, and three ways to write them; for `fedcenters-edge flash`."""
