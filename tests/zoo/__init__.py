"""Models of third-party libraries, with small sizes and random weights, each put to the compiler: `make models`."""
