"""Programs whose time and memory `speed.py` compares, with one module for each case."""
