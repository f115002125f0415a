"""Standard output, text on a terminal, and progress."""
