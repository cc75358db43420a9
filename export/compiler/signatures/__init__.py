"""What a model's forward takes and gives: several inputs packed into one, and the one output that counts."""
