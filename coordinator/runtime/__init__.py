"""The MQTT driver: one event loop that sends tasks, receives updates and closes exchanges."""
