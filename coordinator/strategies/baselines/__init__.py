"""Methods without clusters, which the clustered ones are compared with."""
