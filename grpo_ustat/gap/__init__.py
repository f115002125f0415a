"""The paper's theorems, tested: predictions, measurements, and their agreement."""
