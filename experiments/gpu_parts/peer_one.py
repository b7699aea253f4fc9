"""The process of `peer`: decodes with a static cache, compiled to CUDA graphs on a GPU."""

from __future__ import annotations

import statistics
import time
from typing import Any

from gpu_parts.run import Row
from gpu_parts.timing import spread


def transformers_worker(
    settings: dict[str, Any], use_gpu: bool, capacity: int, prompt_tokens: int, new_tokens: int, repetitions: int
) -> Row:
    """Decode step by step with argmax, which is faster than `generate` of transformers; the process never starts JAX."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    if use_gpu and not torch.cuda.is_available():
        return {"skipped": "this torch has no CUDA"}
    if not use_gpu:
        torch.set_num_threads(1)  # more threads do not help small shapes, and slow them down if others use the cores
    device = torch.device("cuda" if use_gpu else "cpu")
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
        prompt = torch.randint(0, settings["vocab_size"], (1, prompt_tokens))
    cache = StaticCache(config=model.config, max_cache_len=capacity)

    def next_token(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # transformers 4 reads cache_position, 5 only position_ids.
        out = model(
            tokens,
            position_ids=positions[None],
            cache_position=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1:].argmax(-1)

    # A step has many small kernels, which are fast only with a CUDA graph of the whole step.
    step = torch.compile(next_token, mode="reduce-overhead", fullgraph=True) if use_gpu else next_token

    @torch.no_grad()
    def once(steps: int) -> float:
        """Seconds of `steps` steps after a new prefill."""
        cache.reset()
        token = next_token(prompt, torch.arange(prompt_tokens, device=device))
        positions = torch.arange(prompt_tokens, prompt_tokens + steps, device=device)[:, None]
        synchronize()
        start = time.perf_counter()
        for position in positions:
            token = step(token, position).clone()  # a CUDA graph overwrites its result at the next call
        synchronize()
        return time.perf_counter() - start

    def synchronize() -> None:
        if use_gpu:
            torch.cuda.synchronize()

    compile_seconds = once(4)  # the first call compiles, later ones record the graph
    times = [once(new_tokens) / new_tokens for _ in range(repetitions + 1)][1:]
    taken = statistics.median(times)
    return {
        "ms_per_step": 1e3 * taken,
        "tokens_per_s": 1 / taken,
        "spread": spread(times),
        "compile_s": compile_seconds,
        "compiled": use_gpu,
    }
