"""Integrations with other trainers: a callback for TRL, and the tokens of verl's rollouts."""
