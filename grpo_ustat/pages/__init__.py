"""Pages of runs and reports, with their tables, figures and sentences."""
