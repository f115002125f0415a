"""Measurements of a study: each is a module with its record, numbers, sentences, tables, figure."""
