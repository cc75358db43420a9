"""What a run keeps on disk: SQLite and blobs, states as bytes, metrics.jsonl, trackers."""
