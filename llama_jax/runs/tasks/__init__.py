"""What a run trains on, and by which loss: one file for each kind, `choose` for the recipe's, `task` for what they share."""
