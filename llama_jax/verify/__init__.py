"""Is it the same model? Parts of two models compared one by one, and what a model shows of itself."""
