"""Command lines: from what is typed to checked runs, help, completion, errors in one line."""
