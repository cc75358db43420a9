"""The shared kernel: topics, messages, blocks, tensors, codecs, tasks. Pure: no I/O, no clock."""
