"""Standard output, what a terminal shows, and progress."""
