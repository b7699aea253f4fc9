"""A folder with everything that `gpu_report` needs besides Python and JAX's own packages."""

from __future__ import annotations

import re
import shutil
from importlib import metadata
from pathlib import Path

from measuring import ROOT

UNUSED = {"tokenizers", "huggingface-hub", "hf-xet"}  # large, and no measurement needs them
PROVIDED = {"jax", "jaxlib", "numpy", "scipy", "ml-dtypes", "opt-einsum"}  # where JAX is installed
ANY_PYTHON = ".abi3.so"  # a compiled module for every version of Python; others are left out: msgpack works without its own


def bundle(folder: Path) -> None:
    """Copy the library, the experiments and the packages they import to `folder`, which must not exist yet."""
    if folder.exists():
        raise SystemExit(f"--bundle: {folder} exists; give a new folder")
    if folder.resolve().is_relative_to(ROOT):
        raise SystemExit(f"--bundle: {folder} is inside the repository, which is copied; give a folder outside")
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "results")
    for name in ("llama_jax", "experiments"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    copied = sorted(requirements("llama-jax"))
    for name in copied:
        for file in metadata.files(name) or ():
            compiled = file.suffix in (".so", ".pyd") and not file.name.endswith(ANY_PYTHON)
            if ".." not in file.parts and not compiled and file.suffix != ".pyc":
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), target)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 2**20:.0f} MB; llama_jax, experiments, {', '.join(copied)}")


def requirements(package: str) -> set[str]:
    """The packages that an installed package requires, directly or not, except those of JAX and those not installed."""
    names: set[str] = set()
    rest = [package]
    while rest:
        for line in metadata.requires(rest.pop()) or ():
            name = re.match(r"[\w.-]+", line)
            normal = re.sub(r"[-_.]+", "-", name[0]).lower() if name else ""
            if "extra ==" in line or normal in names | PROVIDED | UNUSED | {""}:
                continue
            try:
                metadata.version(normal)
            except metadata.PackageNotFoundError:
                continue
            names.add(normal)
            rest.append(normal)
    return names
