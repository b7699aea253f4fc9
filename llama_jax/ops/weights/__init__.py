"""Leaves of `Llama` in the place of matrices: weights in fewer bits than floats have, and weights with an adapter."""
