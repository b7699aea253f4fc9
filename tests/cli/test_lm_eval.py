"""`llama-jax lm-eval`, before the harness is asked; what it then does is in tests/evaluation/test_lm_eval_adapter.py."""

import pytest
from commands import error_of, run_here


def test_without_the_harness(monkeypatch):
    monkeypatch.setattr("llama_jax.cli.lm_eval.find_spec", lambda name: None)
    refused = error_of(run_here("lm-eval", "model", "--tasks", "arc_easy"))
    assert refused == (
        'llama-jax: error: tasks need the lm-evaluation-harness; install it with pip install -e ".[lm-eval]"\n'
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--limit", 1.5], "limit=1.5 must be a number of questions, or a share of them between 0 and 1"),
        (["--limit", 0], "limit=0.0 must be"),
        (["--num-fewshot", -1], "num_fewshot=-1 must be at least 0"),
        (["--batch", 0], "batch=0 must be at least 1"),
        (["--include-path", "nowhere"], "--include-path nowhere is not a folder"),
        (["--format", "llama3"], "--format needs --apply-chat-template"),
        (["--no-fewshot-as-multiturn"], "--no-fewshot-as-multiturn needs --apply-chat-template"),
        (["--samples"], "--samples needs a file; set it with --output"),
        (["--output", "."], "--output . is a folder, not a file"),
    ],
)
def test_options_that_cannot_be(monkeypatch, options, message):
    monkeypatch.setattr("llama_jax.cli.lm_eval.find_spec", lambda name: object())
    assert message in error_of(run_here("lm-eval", "model", "--tasks", "arc_easy", *options))
