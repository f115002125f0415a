"""Hooks in other frameworks' trainers."""
