"""How a method works where the server learns sums only, and where it waits for no device."""
