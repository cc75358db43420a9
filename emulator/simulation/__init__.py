"""Virtual time: the network, device profiles, codecs, attacks, checkpoints."""
