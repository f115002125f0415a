"""Programs that `speed.py` compares in seconds and memory, a module for each case."""
