"""Run folders: what a run leaves behind."""
