"""A device's life: connect, fetch, train, upload, and survive a power cut."""
