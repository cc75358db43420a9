"""The nearest center for this device: measure, choose, fetch, over MQTT or HTTP."""
