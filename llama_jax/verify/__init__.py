"""Is it the same model? The parts of two models compared one by one, and checks of a model without a reference."""
