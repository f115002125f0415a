"""The page of one run: its tables, figures and sentences."""
