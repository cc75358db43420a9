"""Small faults put into the code, one at a time: a test should fail for each (`make mutants`)."""
