"""Training: loss, optimizer, and the training step."""
