"""Real processes on one machine: a broker, a coordinator and devices, from an empty folder to the result."""
