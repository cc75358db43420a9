"""A torch model becomes a file that another runtime loads."""
