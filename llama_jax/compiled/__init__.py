"""Programs found again without tracing: executables in the cache folder, by everything that they depend on."""

from llama_jax.compiled.cached_jit import LOADED, CompiledFunction, jit
from llama_jax.compiled.store import VARIABLE, refusal

__all__ = ["LOADED", "VARIABLE", "CompiledFunction", "jit", "refusal"]
