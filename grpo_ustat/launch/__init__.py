"""A run starts, in this process or in ranks, and goes back into a queue when it is stopped."""
