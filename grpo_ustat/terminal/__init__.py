"""Standard output, terminal text and progress displays."""
