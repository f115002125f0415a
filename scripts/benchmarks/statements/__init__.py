"""Statements of studies; `error_rates.py` counts how often they are wrong."""
