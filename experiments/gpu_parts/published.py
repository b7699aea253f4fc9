"""Figures that other projects publish, to read next to the measured ones."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_parts.run import Row, Run

# What, on which device, tokens/s (training: per device), the share of the nominal bandwidth or of the peak, and its source.
# Shares of those that do not publish one are derived from the tokens/s.
FIGURES = (
    ("vLLM", "decode, 8B bfloat16, one row", "H100", 133, 0.60, "vllm-project/vllm#16937"),
    ("gpt-fast", "decode, 8B bfloat16, one row", "A100", 93.9, 0.69, "meta-pytorch/gpt-fast, README"),
    ("gpt-fast", "decode, 7B int8, one row", "A100", 156, 0.52, "meta-pytorch/gpt-fast, README"),
    ("gpt-fast", "decode, 7B int4 in groups of 32, one row", "A100", 197, 0.42, "meta-pytorch/gpt-fast, README"),
    ("torchao", "decode, 8B int8, one row", "A100", 153, 0.56, "pytorch/ao, README"),
    ("torchao", "decode, 8B int4 in groups of 64, one row", "A100", 181, 0.37, "pytorch/ao, README"),
    ("vLLM 0.13", "128 prompts, 8B bfloat16", "H100", 6612, None, "pytorch/ao, docs/workflows/inference.md"),
    ("vLLM 0.13", "128 prompts, 8B int8 weights", "H100", 4310, None, "pytorch/ao, docs/workflows/inference.md"),
    ("vLLM 0.13", "prefill, 8B bfloat16", "H100", 30947, 0.50, "pytorch/ao, docs/workflows/inference.md"),
    ("torchtitan", "training, 8B bfloat16, 8 devices at 500 W", "H100", 6667, 0.37, "pytorch/torchtitan, benchmarks"),
    ("MaxText", "training, Llama 2 7B, 8 devices", "H100", 11361, 0.50, "NVIDIA/JAX-Toolbox"),
)


def published(run: Run) -> Iterator[Row]:
    """The figures as rows."""
    for project, what, device, speed, share, source in FIGURES:
        yield {"project": project, "what": what, "device": device, "tokens_per_s": speed, "share": share, "source": source}
