"""How events travel: base.py says what a transport promises, mqtt.py keeps it."""
