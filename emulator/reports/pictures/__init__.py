"""What a run keeps so that it can be drawn, and the pictures drawn from it: devices, shares, images."""
