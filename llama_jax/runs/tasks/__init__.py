"""Kinds of training, their data and losses: one file for each, `interface` for what they have in common."""
