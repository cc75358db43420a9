"""One exchange over the network, its tasks, uploads, replies; and what stands in its place without rounds."""
