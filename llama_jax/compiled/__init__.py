"""A persistent cache of compiled executables, keyed by everything they depend on, so that later processes need not
trace."""

from llama_jax.compiled.cached_jit import LOAD_DURATION_EVENT, CompiledFunction, jit
from llama_jax.compiled.store import EXECUTABLES_ENV, reason_unsafe

__all__ = ["EXECUTABLES_ENV", "LOAD_DURATION_EVENT", "CompiledFunction", "jit", "reason_unsafe"]
