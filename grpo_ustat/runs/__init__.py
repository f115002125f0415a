"""Run folders: what a run leaves behind, how it is read back, and trackers that show it."""
