"""Functions with a gradient of the user's own (torch.autograd.Function), kept through both stages of tracing."""
