"""The model: operations applied to parameters and a cache. No other room knows the whole model."""
