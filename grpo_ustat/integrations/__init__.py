"""Integrations with other trainers: a callback for TRL, and a recorder of tokens for verl."""
