"""How events travel: base.py says what a transport promises; mqtt.py and memory.py keep it."""
