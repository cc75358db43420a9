"""What one sample is where a model takes several arrays: their names, shapes and places in a row of numbers."""
