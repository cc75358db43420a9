"""The phone's page over HTTPS."""
