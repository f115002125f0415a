"""Typed configurations: schemas, checks and identities of runs."""
