"""Tests of the paper's theorems, which compare predictions with measurements."""
