"""The page on which people see a run and steer it: its numbers (metrics_view.py), who may see them, and its server."""
