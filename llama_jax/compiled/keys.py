"""The cache key of an executable: process-independent text for everything it depends on.

A value without such a text raises `UnkeyableError`, for example a user's function, because its source may change.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import re
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import llama_jax
from llama_jax.ops import exact, platform

PACKAGE = "llama_jax"
# JAX settings that do not affect programs: caches, logging, permissions of the host.
IGNORED_SETTINGS = re.compile(
    "cache|jax_log_|logging|debug_log|traceback|tracer_error|jax_dump|dumps$|explain|pprint|source_url"
    "|transfer|guard|timeout|jax_platform|visible_devices|num_cpu_devices"
)


class UnkeyableError(Exception):
    """A program depends on a value that has no process-independent text."""


def text_of(value: Any) -> str:
    """The text of a static argument.

    Raises:
      UnkeyableError: it has none.
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, Enum):
        return f"{text_of(type(value))}.{value.name}"
    if isinstance(value, np.dtype):
        return f"dtype {value}"
    if isinstance(value, PartitionSpec):  # before tuples, since it is a tuple in some JAX versions
        return f"spec {text_of(tuple(value))}"
    if isinstance(value, tuple | list):
        return f"{type(value).__name__}({', '.join(map(text_of, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{text_of(name)}: {text_of(each)}' for name, each in value.items())}}}"
    if isinstance(value, type | FunctionType):
        return _name_of(value)
    if isinstance(value, functools.partial):
        return f"partial({text_of(value.func)}, {text_of(value.args)}, {text_of(value.keywords)})"
    if isinstance(value, Mesh):
        return f"mesh {_ids(value.devices.flat)} {text_of(value.abstract_mesh)}"
    if isinstance(value, AbstractMesh):
        kind = getattr(value.abstract_device, "device_kind", None)
        return f"mesh {value.shape_tuple} {value.axis_types} {kind}"
    if isinstance(value, NamedSharding):
        return f"sharding {text_of(value.mesh)} {text_of(value.spec)} {value.memory_kind}"
    if isinstance(value, SingleDeviceSharding):
        return f"on {_ids(value.device_set)} {value.memory_kind}"
    if dataclasses.is_dataclass(value):
        fields = (f"{field.name}={text_of(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{_name_of(type(value))}({', '.join(fields)})"
    raise UnkeyableError(f"a {type(value).__name__}")


def _ids(devices: Any) -> list[int]:
    return [device.id for device in devices]


def _name_of(value: Any) -> str:
    """The qualified name of a function or type, if importing that name returns the same object."""
    place = f"{value.__module__}.{value.__qualname__}"
    library = value.__module__.split(".")[0]
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not value or library not in (PACKAGE, "numpy", "jax", "jaxlib", "ml_dtypes", "builtins"):
        raise UnkeyableError(f"{place}, which is not from the library")
    return place


def structure_text(tree: Any) -> str:
    """The text of a `PyTreeDef`.

    Raises:
      UnkeyableError: a node contains a value without a text.
    """
    node, children = tree.node_data(), tree.children()
    if node is None:
        return "*"
    if node[0] is type(None):
        return "None"
    return f"{text_of(node[0])}{text_of(node[1])}[{', '.join(map(structure_text, children))}]"


def leaf_text(leaf: Any) -> str:
    """Shape, dtype, sharding over several devices, and memory layout of an argument."""
    if not hasattr(leaf, "dtype"):
        return type(leaf).__name__  # a Python number
    weak = " weak" if getattr(leaf, "weak_type", False) else ""
    return f"{_dtype_text(leaf.dtype)}{leaf.shape}{weak}{_placed(leaf)}"


_dtype_text = functools.cache(str)  # 9 us each time


def _placed(leaf: Any) -> str:
    sharding = getattr(leaf, "sharding", None) if isinstance(leaf, jax.Array) else None
    if sharding is None:
        return ""
    divided = "" if isinstance(sharding, SingleDeviceSharding) else f" {text_of(sharding)}"
    usual, layout = next(iter(sharding.device_set)).default_memory().kind, leaf.format.layout
    memory = "" if sharding.memory_kind in (None, usual) else f" in {sharding.memory_kind}"
    order = getattr(layout, "major_to_minor", None)
    return divided + memory + ("" if order is None or tuple(order) == tuple(range(leaf.ndim)) else f" order {order}")


def devices_of(leaves: Sequence[Any]) -> tuple[list[Any], bool]:
    """The devices that a program with these arguments runs on, in order, and whether its arguments are committed to them."""
    for leaf in leaves:
        sharding = getattr(leaf, "sharding", None) if isinstance(leaf, jax.Array) and leaf.committed else None
        if isinstance(sharding, NamedSharding):
            return list(sharding.mesh.devices.flat), True
        if isinstance(sharding, SingleDeviceSharding):
            return list(sharding.device_set), True
        if sharding is not None:
            raise UnkeyableError(f"a {type(sharding).__name__}")
    default = jax.config.jax_default_device  # type: ignore[attr-defined]  # made when JAX is imported
    return [jax.devices(default)[0] if default is None or isinstance(default, str) else default], False


def environment_text(devices: Sequence[Any]) -> str:
    """Everything a program depends on except its arguments: library, JAX, compiler, flags, contexts, CPU."""
    settings = jax.config
    client = devices[0].client
    names = sorted(name for name in settings.values if not IGNORED_SETTINGS.search(name))
    parts = [
        f"library {library_digest()}",
        f"python {sys.version_info[:2]} jax {jax.__version__} jaxlib {jaxlib.__version__}",
        f"{client.platform} {client.platform_version} {devices[0].device_kind} {_ids(devices)}",
        *(f"{name}={getattr(settings, name, None)}" for name in names),
        *(f"{name}={value}" for name, value in sorted(os.environ.items()) if name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")),
        text_of(
            (platform.native_code.value, platform.target_platform.value, platform.rematerializing.value, exact.is_exact())
        ),
        text_of(jax.sharding.get_abstract_mesh()),
    ]
    if client.platform == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        native = platform.cpu_variants().native
        parts += [native.processor(), f"cores {cores}", f"native {native.compiler()}"]
    return "\n".join(parts)


@functools.cache
def library_digest() -> str:
    """A digest of the library's sources, which takes 10 ms. Not of their dates, which some installers make equal."""
    folder = Path(llama_jax.__file__).parent
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for ending in ("py", "h", "cc") for path in folder.rglob(f"*.{ending}")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()
