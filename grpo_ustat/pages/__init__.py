"""Pages, tables and figures of a run."""
