"""One exchange over the network: its tasks, the uploads of the devices, the stored replies, and what comes late."""
