"""Tests of the paper's theorems: predictions, measurements and their agreement."""
