"""Measurements of a study; each module has a record, its numbers, sentences, tables and figure."""
