"""Typed configurations: schemas, checks of what can be asked for, identities of runs."""
