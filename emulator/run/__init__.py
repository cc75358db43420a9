"""One simulated run in four steps, one file each: resolve the options, load the fleet, execute the rounds, write."""
