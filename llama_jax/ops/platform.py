"""The platform a program is traced for, the dispatch to `ops.cpu`, and the options that select kernels."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

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


class KernelOptions(NamedTuple):
    """The options of a program that select its kernels.

    Attributes:
      exact: whether a token's results may depend only on its own row, see `ops.exact`.
      native_code: whether a program for a CPU may use native code (`ops.cpu.native`) for floats as well. Decoding programs
        may. Others, such as training, gain too little to wait for a C++ compiler.
      save_cast_weights: whether a matmul saves its weight cast to the dtype of the computation for the backward pass. In a
        rematerialized layer it is recomputed anyway, and so gathered from the devices once per pass; otherwise a matmul
        saves the original weight, which is in memory already.
      forward_mode: whether only functions may be used that JAX differentiates in every mode, see `ops.gradients`.
    """

    exact: bool = False
    native_code: bool = False
    save_cast_weights: bool = False
    forward_mode: bool = False


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


_CPU_VARIANTS: dict[Callable[..., Any], tuple[Callable[..., Any], tuple[str, ...]]] = {}
_variant_imports: list[Callable[[], None]] = []


def before_cpu_programs(import_variants: Callable[[], None]) -> None:
    """Call a function that imports variants before any are looked up; the file of a variant imports what it replaces."""
    _variant_imports.append(import_variants)


def has_cpu_variant(plain: F) -> F:
    """Decorator of a function which programs for a CPU may replace by another, registered with `cpu_variant_of`."""

    @functools.wraps(plain)
    def dispatch(*args: Any, **options: Any) -> Any:
        platform = lowering_platform()
        if platform in ("gpu", "tpu"):
            return plain(*args, **options)
        for import_variants in _variant_imports:
            import_variants()
        variant, platforms = _CPU_VARIANTS.get(dispatch, (plain, ()))
        return variant(plain, *args, **options) if platform in platforms else plain(*args, **options)

    return cast(F, dispatch)


def cpu_variant_of(function: Callable[..., Any], *, for_accelerator_targets: bool = False) -> Callable[[F], F]:
    """Decorator of a variant: when `function`, which wraps `plain`, is traced for a CPU, `variant(plain, *args)` is called.

    Args:
      function: has the decorator `has_cpu_variant`.
      for_accelerator_targets: also for the `target_platform` "accelerator". A CPU's compiler compiles such programs, and it
        could not compile the plain function.
    """

    def register(variant: F) -> F:
        _CPU_VARIANTS[function] = variant, ("cpu", "accelerator") if for_accelerator_targets else ("cpu",)
        return variant

    return register


@has_cpu_variant
def pack_bits(tree: Any) -> Any:
    """The same tree; on a CPU, with 16-bit floats bitcast to integers. `unpack_bits` undoes it. Both are free."""
    return tree


@has_cpu_variant
def unpack_bits(tree: Any) -> Any:
    """Undo `pack_bits`."""
    return tree


@has_cpu_variant
def kernel_options(params: Any, options: KernelOptions) -> KernelOptions:
    """The options for these parameters: on a CPU, `native_code` also if quantized weights need it anyway."""
    return options


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
