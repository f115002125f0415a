"""Statements of studies and how often they are wrong: what `error_rates.py` counts."""
