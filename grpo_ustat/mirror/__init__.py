"""A command that sends what run folders hold to a tracker, once."""
