"""Kinds of statements in studies; `error_rates.py` counts how often the statements are wrong."""
