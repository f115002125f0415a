"""Readers for rollouts and scalars that other programs logged, and the conversion of rollouts."""
