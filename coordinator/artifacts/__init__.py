"""What a run produces: the compiled program, the published bundle and catalog, client releases."""
