"""What a server plans to need of the memory."""

from dataclasses import replace

import jax
import pytest

import llama_jax
from llama_jax.errors import UserError
from llama_jax.formats import open_checkpoint
from llama_jax.formats.loading import bundled, planned_weights
from llama_jax.model.cache import CacheOptions, cache_bytes
from llama_jax.model.trees import bytes_in_memory
from llama_jax.serving import options as module
from llama_jax.serving.options import EngineOptions, MemoryPlan, fit_options, free_memory

CONFIG = replace(llama_jax.preset("llama-3.1-8b"), max_seq_len=131_072)
ROW = cache_bytes(CONFIG, 1, 131_072, "bfloat16")


def planned(free):
    return lambda options: MemoryPlan(weights=16, pool=options.pool_bytes(CONFIG, "bfloat16"), programs=2, free=free)


@pytest.mark.parametrize(
    ("free", "found"),
    [
        (None, (16, 131_072)),
        (3 * ROW, (16, 131_072)),
        (ROW, (16, 32_768)),
        (ROW // 16, (4, 512)),
        (ROW // 200, (1, 512)),  # more than half of it
    ],
)
def test_defaults_follow_the_memory(free, found):
    options, plan = fit_options(EngineOptions(), CONFIG, planned(free), ())
    assert (options.rows, options.context) == found
    assert plan.pool == options.pool_bytes(CONFIG, "bfloat16")
    if free is not None:
        assert plan.total <= free


def test_what_was_chosen_stays_or_is_refused():
    options, _ = fit_options(EngineOptions(context=65_536), CONFIG, planned(3 * ROW), ["context"])
    assert (options.rows, options.context) == (16, 65_536)
    with pytest.raises(UserError, match=r"the memory is too small: .* MB are free; --context \d+ would fit$"):
        fit_options(EngineOptions(context=131_072), CONFIG, planned(ROW), ["context"])
    with pytest.raises(UserError, match=r"--rows \d --context 512 would fit$"):
        fit_options(EngineOptions(context=131_072), CONFIG, planned(ROW // 32), ["rows", "context"])
    with pytest.raises(UserError, match=r"choose fewer bits .*, or a smaller model"):
        fit_options(EngineOptions(), CONFIG, planned(20), ())


@pytest.mark.parametrize("cache", [None, "int8"])
def test_the_pool_is_what_the_engine_can_have(cache):
    options = EngineOptions(rows=4, context=1000, cache=CacheOptions(dtype=cache))
    small = replace(CONFIG, n_layers=2)
    assert options.pool_bytes(small, "float32") == cache_bytes(small, 1, 4 * 512, cache or "float32")


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", None), (None, None), ("bfloat16", "int8"), (None, "q4_0")])
def test_weights_are_planned_as_they_are_loaded(dtype, quantize):
    target, size = planned_weights(open_checkpoint(bundled()), dtype, quantize)
    _, params, _ = llama_jax.load(dtype=dtype, quantize=quantize)
    assert target == params.final_norm.dtype
    assert size == bytes_in_memory(params)


def test_the_free_memory_is_that_of_the_machine_and_of_its_containers(tmp_path, monkeypatch):
    (device, *_) = jax.devices("cpu")
    assert 0 < free_memory(device) < 2**50
    monkeypatch.setattr(module, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(module, "CGROUPS", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 4000 kB\nMemAvailable:    3000 kB\n")
    assert free_memory(device) == 3000 << 10
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(device) == 3000 << 10
    for name, text in (("max", "2000000\n"), ("current", "900000\n"), ("stat", "anon 1\ninactive_file 50000\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert free_memory(device) == 1_150_000
