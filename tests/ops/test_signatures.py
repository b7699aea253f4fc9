"""Signatures say the dtypes and shapes of arrays: the tests are held to them, and those who use the library pay nothing."""

import subprocess
import sys

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from llama_jax import ops
from llama_jax.inference.sampling import Sampling, sample
from llama_jax.model.cache import cache_from
from llama_jax.ops.attention import AttentionMask, KVView
from llama_jax.training.policy_gradient import policy_loss

KEYS = jnp.zeros((2, 3, 5, 8))  # [B, K, S, H]


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.rms_norm(jnp.zeros((2, 8)), jnp.zeros(7), 1e-5),
        lambda: ops.rms_norm(jnp.zeros((2, 8), jnp.int32), jnp.zeros(8), 1e-5),
        lambda: ops.apply_rotary(jnp.zeros((2, 5, 8)), jnp.zeros((5, 4)), jnp.zeros((5, 3))),
        lambda: ops.attend(KEYS, KVView(KEYS, KEYS), AttentionMask.causal(5), scale=1.0),
        lambda: cache_from(KEYS[None], KEYS[None], jnp.zeros(3, jnp.int32), 16),
        lambda: sample(jnp.zeros((2, 9)), Sampling().per_row(2), jnp.zeros((2, 9)), jnp.zeros(2, jnp.int32)),
        lambda: policy_loss(jnp.zeros((2, 5)), jnp.zeros((2, 5)), jnp.zeros(5), jnp.ones((2, 5), bool)),
    ],
)
def test_other_arrays_are_errors_under_the_tests(call):
    with pytest.raises(TypeCheckError):
        call()


def test_nothing_is_checked_or_wrapped_without_the_hook():
    code = (
        "import sys, llama_jax.ops, llama_jax.inference.decode, llama_jax.training.step\n"
        "assert not {'beartype', 'jaxtyping._pytest_plugin'} & set(sys.modules)\n"
        "modules = [m for name, m in sys.modules.items() if name.startswith('llama_jax.')]\n"
        "functions = [f for m in modules for f in vars(m).values() if getattr(f, '__module__', '') == m.__name__]\n"
        "files = {f.__code__.co_filename for f in functions if hasattr(f, '__code__')}\n"
        "assert len(functions) > 100 and not [file for file in files if 'jaxtyping' in file]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
