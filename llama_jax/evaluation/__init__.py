"""Models on tasks: log-probabilities of given texts, generations, and the interface of the lm-evaluation-harness."""
