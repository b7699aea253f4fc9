"""Options that locate a model or a vocabulary: a path on this machine, or a URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from tyro.constructors import PrimitiveConstructorSpec

from llama_jax.storage import Location, StoredPath, locate, resolved

PLACE: PrimitiveConstructorSpec[Location] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="PATH",
    instance_from_str=lambda texts: locate(texts[0]),
    is_instance=lambda value: isinstance(value, Path | StoredPath),
    str_from_instance=lambda place: [os.fspath(place)],
)
ModelPath = Annotated[Location, PLACE]


def bytes_at(place: Location) -> int:
    """The size of a file, or of all files in a folder."""
    place = resolved(place)
    if isinstance(place, Path):
        files = place.rglob("*") if place.is_dir() else [place]
        return sum(path.stat().st_size for path in files if path.is_file())
    there = place.iterdir() if place.is_dir() else [place]
    return sum(path.stat().st_size for path in there if path.is_file())
