"""How much is computed at a time; known before torch is imported, for costs."""

LOGIT_BYTES = {"cpu": 2**26, "cuda": 2**30}  # of the logits behind scores, at a time
