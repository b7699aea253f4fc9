"""Evaluation of models: `measure` runs a model over texts in batches, and each metric is computed from its results.

perplexity.evaluate(config, params, corpus)         loss, perplexity and bits per byte
perplexity.kl_to_reference(...)                     how far predictions are from a reference's
perplexity.preference_accuracy(pair_logprobs(...))  how often preferred answers are the more probable ones
loglikelihood.score_pairs(...)                      log-probabilities of given continuations
lm_eval_adapter.HarnessModel(TextModel(...))        the tasks of the lm-evaluation-harness
"""
