"""Command lines: parsing, checks, sweeps, help, shell completion and error messages."""
