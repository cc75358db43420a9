"""The nearest center for a device that did not train: the fitted router, and the answers over MQTT."""
