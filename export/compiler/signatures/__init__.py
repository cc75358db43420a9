"""What a model's forward takes, gives and keeps: packed inputs, the one output that counts, what no file holds."""
