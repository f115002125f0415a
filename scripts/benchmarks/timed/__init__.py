"""Programs whose seconds and memory `speed.py` compares, a module for each case."""
