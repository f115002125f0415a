"""How processes start, stop and go on: the ways in, ranks of our own, sweeps."""
