"""When an exchange ends, what a round consists of, which update is accepted, and the metrics. Pure."""
