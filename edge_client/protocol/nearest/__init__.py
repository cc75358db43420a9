"""Files about the nearest center that both sides read: catalog, router, sketch, tree of centers."""
