"""Kinds of training, with their data and losses: one file for each, and `interface` for what they share."""
