"""The platform a program is traced for, and the dispatch to `ops.cpu`.

The three contexts are JAX user contexts, part of its jit cache keys.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

AnyArray: TypeAlias = jax.Array | np.ndarray
Tree = TypeVar("Tree")
F = TypeVar("F", bound=Callable[..., Any])
TPU_LANES = 128  # values of a TPU's vector register along the last axis; blocks of TPU kernels are multiples of it

target_platform = jax.make_user_context(None)
"""Context: the platform to trace programs for instead of the devices' own, to compile or analyze them elsewhere; else None.

"accelerator": an unspecified GPU or TPU; no kernel is selected.
"""

rematerializing = jax.make_user_context(False)
"""Context: whether the traced layer is rematerialized in the backward pass.

If so, a matmul saves its weight cast to the dtype of the computation as a residual (it is recomputed anyway, and gathered
once per pass); otherwise it saves the original weight, which is in memory already.
"""

native_code = jax.make_user_context(False)
"""Context: whether a program for a CPU may use native code (`ops.cpu.native`) for floats as well.

Decoding programs may. Others, such as training, gain too little to wait for a C++ compiler.
"""


def lowering_platform() -> str:
    """The platform that the program traced now will be lowered for: "cpu", "gpu", "tpu", or the `target_platform`.

    It is read from JAX's trace context, which is part of the jit cache keys: the current mesh (`jax.set_mesh`, or
    `jax.sharding.use_abstract_mesh` inside a traced function), whose devices need not exist; else `jax.default_device`;
    else the default backend. Trace a program for another platform under its mesh, as the library's functions do for sharded
    parameters (`inference.sharding.sharding_of`), or under `jax.default_device`, for example in your own `jax.jit`.
    """
    if target_platform.value is not None:
        return target_platform.value
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    platform = getattr(device, "platform", None)
    if platform is None:
        default = jax.config.jax_default_device  # type: ignore[attr-defined]  # JAX defines its settings at import
        platform = default if isinstance(default, str) else getattr(default, "platform", None)
    return _name_of(platform or jax.default_backend())


def _name_of(platform: str) -> str:
    return "gpu" if platform in ("cuda", "rocm") else platform


def nondefault_device(array: Any) -> Any:
    """The array's device, if it is a single device of another platform than the default one; else None."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, SingleDeviceSharding):
        return None
    device: Any = next(iter(sharding.device_set))
    return None if _name_of(device.platform) == lowering_platform() else device


def tracing_for(params: Any) -> AbstractContextManager[Any]:
    """The context in which to call `jax.jit` with these parameters: it traces for the platform of the first of them."""
    leaves = jax.tree.leaves(params)
    device = nondefault_device(leaves[0]) if leaves else None
    return nullcontext() if device is None else jax.default_device(device)


def cpu_variants() -> Any:
    """The package `ops.cpu`, imported lazily, because it imports the functions that it replaces."""
    return importlib.import_module("llama_jax.ops.cpu")


def for_cpu(name: str, *, for_accelerator_targets: bool = False) -> Callable[[F], F]:
    """When traced for a CPU, call `ops.cpu.<name>(plain, *args)` instead of the decorated function `plain`.

    Args:
      name: name of the variant in `ops.cpu`.
      for_accelerator_targets: also for the `target_platform` "accelerator". A CPU's compiler compiles such programs, and it
        could not compile the plain function.
    """
    platforms = ("cpu", "accelerator") if for_accelerator_targets else ("cpu",)

    def decorate(plain: F) -> F:
        @functools.wraps(plain)
        def chosen(*args: Any, **options: Any) -> Any:
            if lowering_platform() not in platforms:
                return plain(*args, **options)
            return getattr(cpu_variants(), name)(plain, *args, **options)

        return cast(F, chosen)

    return decorate


@for_cpu("pack_tree")
def pack_bits(tree: Any) -> Any:
    """The same tree; on a CPU, with 16-bit floats bitcast to integers. `unpack_bits` undoes it. Both are free."""
    return tree


@for_cpu("unpack_tree")
def unpack_bits(tree: Any) -> Any:
    """Undo `pack_bits`."""
    return tree


@for_cpu("tracing_context")
def tracing_context(params: Any) -> AbstractContextManager[Any]:
    """The context in which to trace a model, see `native_code`."""
    return nullcontext()


def decodes_natively(params: Any, dtype: Any, mesh: Any) -> bool:
    """Whether a model is decoded on a single CPU in a dtype with native matmuls, see `decoding_context`."""
    first, divided = jax.tree.leaves(params)[0], mesh is not None and mesh.size > 1
    platform = next(iter(first.devices())).platform if isinstance(first, jax.Array) else lowering_platform()
    return platform == "cpu" and not divided and str(jnp.dtype(dtype or params.embedding.dtype)) in ("float32", "bfloat16")


def decoding_context(natively: bool) -> AbstractContextManager[Any]:
    """Context for decoding programs: small matmuls and attention use native code if `natively` and a compiler exists.

    Args:
      natively: see `decodes_natively`.
    """
    if not natively:
        return native_code(False)
    return native_code(cpu_variants().native.compiler() is not None)


def lowering_device_kind() -> str:
    """JAX's name of the devices that the program traced now will be lowered for, such as "NVIDIA H100 80GB HBM3"."""
    if target_platform.value is not None:
        return target_platform.value
    mesh_kind = getattr(getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None), "device_kind", None)
    return mesh_kind or jax.local_devices(backend=lowering_platform())[0].device_kind


def is_partitioned() -> bool:
    """Whether the program traced now is for a mesh of several devices, including inside `shard_map`."""
    return jax.sharding.get_abstract_mesh().size > 1


def current_mesh_sizes() -> dict[str, int]:
    """Axis names and sizes of the mesh over which XLA partitions the program traced now; empty inside `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty or mesh.manual_axes else dict(mesh.shape)


def update_if(condition: jax.Array, update: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """`update(tree)` if `condition`, a bool[], is true, and the same tree otherwise.

    On a GPU with `jnp.where`: a `cond` would copy the whole state (a training step of TinyLlama on an H100 needs 5.4 GiB of
    temporaries, or 16.4 GiB with `cond`). Elsewhere with `lax.cond`: a `where` holds both trees (over eight v5e 2.07 GiB, or
    1.61 GiB with `cond`).
    """
    if lowering_platform() == "gpu":
        return jax.tree.map(lambda new, old: jnp.where(condition, new, old), update(tree), tree)
    return lax.cond(condition, update, lambda tree: tree, tree)


_RECORDED: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("attention", default=None)


@contextlib.contextmanager
def record_backends() -> Iterator[dict[str, str]]:
    """Context that collects the attention backends in use, each with the reason for its first use.

    Backends are chosen while a program is traced, so programs that were compiled before are not recorded.
    """
    backends: dict[str, str] = {}
    before = _RECORDED.set(backends)
    try:
        yield backends
    finally:
        _RECORDED.reset(before)


def log_backend(name: str, why: str) -> None:
    """Report the backend in use, and why, to the log and to `record_backends`, inside which each is logged once."""
    backends = _RECORDED.get()
    if backends is None or name not in backends:
        logging.getLogger("llama_jax.attention").info("attention: %s (%s)", name, why)
    if backends is not None:
        backends.setdefault(name, why)
