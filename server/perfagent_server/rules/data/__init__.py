"""Rules on the batches that the model is fed."""
