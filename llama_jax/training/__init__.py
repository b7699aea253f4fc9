"""Learning from tokens: the loss, the optimizer, and the step that joins them."""
