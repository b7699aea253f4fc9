"""Training from beginning to end: recipes, the loop, its checkpoints and its curves; and how good a model is on a text.

Recipe, recipes.find(name)                what to train: a frozen dataclass, by a built-in name or from a file
train(recipe, workdir, data)              train it, or go on with it; also by the recipe's name
snapshots.Snapshots                       the checkpoints of a run
evaluate.evaluate(config, params, corpus) loss, perplexity and bits per byte
plot.draw(runs)                           curves of one or several runs
"""
