"""Is it the same model? Comparison of two models part by part, and checks of a model without a reference."""
