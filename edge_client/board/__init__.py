"""What a board is given: profiles, the list of files, and three ways to write them; for `fedcenters-edge flash`."""
