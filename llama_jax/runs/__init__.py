"""Training runs: recipes, the loop, its checkpoints and its metrics.

Recipe, recipes.find(name)             what to train: a frozen dataclass, by a built-in name or from a file
train(recipe, workdir, data)           train it, or resume it; also by the recipe's name
checkpoint_manager.CheckpointManager   the checkpoints of a run
"""
