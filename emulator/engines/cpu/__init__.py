"""The engine `lean`: one device after the other on one CPU thread."""
