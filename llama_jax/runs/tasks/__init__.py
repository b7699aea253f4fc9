"""Kinds of training, their data and losses: one file for each, `choose` for the recipe's, `task` for their interface."""
