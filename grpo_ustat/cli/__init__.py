"""Command lines: from what is typed to checked runs; sweeps, help, completion, messages."""
