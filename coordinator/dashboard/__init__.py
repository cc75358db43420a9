"""The page on which people see and steer a run: its numbers (displayed_metrics.py), who may see them, its server."""
