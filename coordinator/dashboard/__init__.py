"""The page on which people see a run and steer it: what it shows, who may see it, and the server that sends it."""
