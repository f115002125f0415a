"""Trackers: a process of its own that follows a run folder and sends its events."""
