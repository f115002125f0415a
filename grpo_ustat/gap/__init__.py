"""The paper's results as studies: predictions, measurements, and their agreement."""
