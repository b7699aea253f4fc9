"""Training runs: recipes, the loop, its checkpoints and its curves; and the evaluation of models on texts.

Recipe, recipes.find(name)                what to train: a frozen dataclass, by a built-in name or from a file
train(recipe, workdir, data)              train it, or resume it; also by the recipe's name
snapshots.Snapshots                       the checkpoints of a run
evaluate.evaluate(config, params, corpus) loss, perplexity and bits per byte
plot.draw(runs)                           curves of one or several runs
"""
