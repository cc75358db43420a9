"""The numbers of a task: fit and probe over a learner."""
