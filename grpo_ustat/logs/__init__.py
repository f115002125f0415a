"""Rollouts that other programs have logged: readers, one kind of row, conversion."""
