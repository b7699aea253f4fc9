"""Which platform a program is being made for."""

from __future__ import annotations

import jax


def lowering_platform() -> str:
    """The platform that what is traced now will be lowered for: "cpu", "gpu" or "tpu".

    It is read from JAX's own trace context, which the cache of `jax.jit` has in its keys: from the mesh in force
    (`jax.set_mesh`, or `jax.sharding.use_abstract_mesh` inside of a traced function), which may be one of devices that are
    not there; else from `jax.default_device`; else it is the default backend. A program for another platform than the
    default one must therefore be traced under its mesh, as the library's own functions for a mesh do.
    """
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    platform = getattr(device, "platform", None)
    if platform is None:
        default = jax.config.jax_default_device
        platform = default if isinstance(default, str) else getattr(default, "platform", None)
    found = platform or jax.default_backend()
    return "gpu" if found in ("cuda", "rocm") else found
