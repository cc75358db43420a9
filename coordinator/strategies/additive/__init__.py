"""Methods whose devices are served a sum of models: one of all devices, one of a group, one of their own."""
