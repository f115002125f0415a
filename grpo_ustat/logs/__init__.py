"""Rollouts that other programs have logged."""
