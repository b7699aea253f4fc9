"""Which platform a program is being made for, what must be chosen by it beside attention, and the door to `ops.cpu`.

The two contexts are JAX's own: it keeps them in the keys of its caches.
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
TPU_LANES = 128  # numbers that lie together in a TPU's memory; blocks of its kernels are multiples of it

planned_for = jax.make_user_context(None)
"""A context that says which platform a program is planned for, where devices of another one stand in for it.

"accelerator" is any but a CPU, of which no kernel is known.
"""

recomputing = jax.make_user_context(False)
"""A context that says whether the layer that is traced is computed again in the backward pass.

A weight that was cast for the computation is then saved as it was cast, which costs nothing, for it is computed again: so
both passes read the same array, and where devices hold parts of it, XLA gathers it once. Otherwise the weight itself is
saved, which is there already.
"""

native_code = jax.make_user_context(False)
"""A context that says whether a program for a CPU may have native code (`ops.cpu.native`) for floats, too.

Programs that decode have it. Others, of which training is one, gain too little to be given a C++ compiler to wait for.
"""


def lowering_platform() -> str:
    """The platform that what is traced now will be lowered for: "cpu", "gpu" or "tpu".

    It is read from JAX's own trace context, which the cache of `jax.jit` has in its keys: from the mesh in force
    (`jax.set_mesh`, or `jax.sharding.use_abstract_mesh` inside of a traced function), which may be one of devices that are
    not there; else from `jax.default_device`; else it is the default backend. A program for another platform than the
    default one must therefore be traced under its mesh, as the library's own functions do for parameters that lie there
    (`inference.sharding.sharding_of`), or under `jax.default_device`, as in a `jax.jit` of your own.
    """
    if planned_for.value is not None:
        return planned_for.value
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    platform = getattr(device, "platform", None)
    if platform is None:
        default = jax.config.jax_default_device  # type: ignore[attr-defined]  # JAX makes its settings when it is imported
        platform = default if isinstance(default, str) else getattr(default, "platform", None)
    return _name_of(platform or jax.default_backend())


def _name_of(platform: str) -> str:
    return "gpu" if platform in ("cuda", "rocm") else platform


def device_elsewhere(array: Any) -> Any:
    """The device of an array on a single one, where programs would by default be traced for another platform; else None."""
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, SingleDeviceSharding):
        return None
    device: Any = next(iter(sharding.device_set))
    return None if _name_of(device.platform) == lowering_platform() else device


def tracing_for(params: Any) -> AbstractContextManager[Any]:
    """The context to call `jax.jit` in with these parameters, which traces for the platform of the first of them."""
    leaves = jax.tree.leaves(params)
    device = device_elsewhere(leaves[0]) if leaves else None
    return nullcontext() if device is None else jax.default_device(device)


def cpu_door() -> Any:
    """The package `ops.cpu`, imported when a CPU needs it, and by its name: it imports what it replaces."""
    return importlib.import_module("llama_jax.ops.cpu")


def for_cpu(name: str, *, to_plan: bool = False) -> Callable[[F], F]:
    """In programs for a CPU, call a function of `ops.cpu` with the decorated one and its arguments in its place.

    Args:
      name: of the function.
      to_plan: also where a CPU's compiler stands in for an accelerator's, see `planned_for`, because it could not compile
        the plain function.
    """
    platforms = ("cpu", "accelerator") if to_plan else ("cpu",)

    def decorate(plain: F) -> F:
        @functools.wraps(plain)
        def chosen(*args: Any, **options: Any) -> Any:
            if lowering_platform() not in platforms:
                return plain(*args, **options)
            return getattr(cpu_door(), name)(plain, *args, **options)

        return cast(F, chosen)

    return decorate


@for_cpu("pack_tree")
def pack_bits(tree: Any) -> Any:
    """The same tree, on a CPU with arrays of 16-bit floats as their bits; `unpack_bits` undoes it. Both cost nothing."""
    return tree


@for_cpu("unpack_tree")
def unpack_bits(tree: Any) -> Any:
    """Undo `pack_bits`."""
    return tree


@for_cpu("tracing_context")
def tracing_context(params: Any) -> AbstractContextManager[Any]:
    """The context to trace a model in, see `native_code`."""
    return nullcontext()


def decodes_natively(params: Any, dtype: Any, mesh: Any) -> bool:
    """Whether a model is decoded on a single CPU, and in floats that are multiplied natively, see `decoding_context`."""
    first, divided = jax.tree.leaves(params)[0], mesh is not None and mesh.size > 1
    platform = next(iter(first.devices())).platform if isinstance(first, jax.Array) else lowering_platform()
    return platform == "cpu" and not divided and str(jnp.dtype(dtype or params.embedding.dtype)) in ("float32", "bfloat16")


def decoding_context(natively: bool) -> AbstractContextManager[Any]:
    """The context to call programs in that decode: few rows that they multiply, and attention to floats, are native.

    Args:
      natively: see `decodes_natively`; if there is a C++ compiler.
    """
    if not natively:
        return native_code(False)
    return native_code(cpu_door().native.compiler() is not None)


def lowering_device_kind() -> str:
    """The name of the devices that what is traced now will be lowered for, as JAX has it: "NVIDIA H100 80GB HBM3"."""
    if planned_for.value is not None:
        return planned_for.value
    mesh_kind = getattr(getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None), "device_kind", None)
    return mesh_kind or jax.local_devices(backend=lowering_platform())[0].device_kind


def is_divided() -> bool:
    """Whether what is traced now is for a mesh of several devices, among which XLA divides it."""
    return jax.sharding.get_abstract_mesh().size > 1


def mesh_in_force() -> dict[str, int]:
    """Names and sizes of the mesh over which XLA divides what is traced now; empty within `shard_map`, for one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty or mesh.manual_axes else dict(mesh.shape)


def update_if(condition: jax.Array, update: Callable[[Tree], Tree], tree: Tree) -> Tree:
    """`update(tree)` where `condition`, a bool[], holds, and the same tree where it does not.

    On a GPU by a choice between every two arrays: of a branch XLA makes the whole result a second time and copies it into
    the donated tree (a training step of TinyLlama on an H100: 16.4 GiB of temporaries, 5.4 by a choice). On a TPU and a CPU
    by a branch, where a choice holds both (TinyLlama over eight v5e: 1.61 GiB by a branch, 2.07 by a choice).
    """
    if lowering_platform() == "gpu":
        return jax.tree.map(lambda new, old: jnp.where(condition, new, old), update(tree), tree)
    return lax.cond(condition, update, lambda tree: tree, tree)


_OBSERVED: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("attention", default=None)


@contextlib.contextmanager
def record_backends() -> Iterator[dict[str, str]]:
    """Collects within it which ways of computing attention are taken, each with the reason of its first time.

    Programs choose when they are traced: what was compiled before is not seen again.
    """
    taken: dict[str, str] = {}
    before = _OBSERVED.set(taken)
    try:
        yield taken
    finally:
        _OBSERVED.reset(before)


def log_backend(name: str, why: str) -> None:
    """Report the backend that is used, and why: to the log, and to a `record_backends` block once for each backend."""
    taken = _OBSERVED.get()
    if taken is None or name not in taken:
        logging.getLogger("llama_jax.attention").info("attention: %s (%s)", name, why)
    if taken is not None:
        taken.setdefault(name, why)
