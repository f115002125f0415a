"""Writing and reading of run folders, and trackers that show them."""
