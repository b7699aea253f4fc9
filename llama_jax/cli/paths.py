"""Options that are a model's or a vocabulary's place: a path of this machine, or a URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from tyro.constructors import PrimitiveConstructorSpec

from llama_jax.storage import Location, StoredPath, locate

PLACE: PrimitiveConstructorSpec[Location] = PrimitiveConstructorSpec(
    nargs=1,
    metavar="PATH",
    instance_from_str=lambda texts: locate(texts[0]),
    is_instance=lambda value: isinstance(value, Path | StoredPath),
    str_from_instance=lambda place: [os.fspath(place)],
)
ModelPath = Annotated[Location, PLACE]
