"""A fleet without a fleet: real clients over MQTT, or many in one process with virtual time."""
