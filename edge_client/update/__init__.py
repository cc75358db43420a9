"""A newer client version: download, trial start, and the way back."""
