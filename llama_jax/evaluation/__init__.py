"""How good a model is: one engine reads texts in batches (`measure`), and each measurement takes its numbers from it.

perplexity.evaluate(config, params, corpus)         loss, perplexity and bits per byte
perplexity.divergence(...)                          how far predictions are from a reference's
perplexity.preference_accuracy(pair_logprobs(...))  how often preferred answers are the more probable ones
loss_by_length.evaluate_lengths(...)                does context help, and how far?
loglikelihood.score_pairs(...)                      log-probabilities of given continuations
lm_eval_adapter.HarnessModel(TextModel(...))        the tasks of the lm-evaluation-harness
"""
