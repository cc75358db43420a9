"""What runs on a device: the client, its protocol kernel, transports and engines."""

__version__ = "0.1.0"
