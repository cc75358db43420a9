"""Updates become centers: means, robust reduces, and the noise of differential privacy."""
