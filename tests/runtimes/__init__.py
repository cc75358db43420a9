"""Every Python and every runtime that we name, run: `make runtimes`."""
