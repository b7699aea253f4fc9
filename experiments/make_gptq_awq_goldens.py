"""Write matrices packed and decoded by AutoGPTQ and AutoAWQ, for the tests.

    pip install torch transformers
    pip download --no-deps auto-gptq==0.7.1 && unzip auto_gptq-*.whl -d gptq
    pip download --no-deps --no-binary :all: autoawq==0.2.9 && tar xf autoawq-*.tar.gz
    python experiments/make_gptq_awq_goldens.py --gptq gptq --awq autoawq-0.2.9

Their layers are plain torch; the rest of the packages, which needs a GPU, is not run. Each layer is decoded by a matmul with
the identity, on a CPU, in its float16. Writes ``tests/goldens/gptq_awq.npz``.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from make_goldens import GOLDENS

ROWS, COLUMNS = 64, 128


@dataclass(frozen=True)
class Arguments:
    """Folders of the unpacked packages."""

    gptq: Path
    awq: Path


def module(path: Path) -> Any:
    """Import a file of a package without the package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def linear(generator: torch.Generator, group: int, half: bool) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """A layer with scales and zeros [rows, groups]; no zero is 0, which AutoGPTQ packs wrongly (as a negative number)."""
    layer = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    layer.weight.data = 0.02 * torch.randn(ROWS, COLUMNS, generator=generator)
    groups = layer.weight.data.reshape(ROWS, COLUMNS // group, group)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = (high - low) / 15
    zeros = torch.round(-low / scales).clamp(1, 15)
    if half:
        scales = scales.half().float()
    # Clip to the range of 4 bits: the packers do not check it.
    q = (torch.round(groups / scales[..., None]) + zeros[..., None]).clamp(0, 15) - zeros[..., None]
    layer.weight.data = (q * scales[..., None]).reshape(ROWS, COLUMNS)
    return layer, scales, zeros


def by_gptq(path: Path, reordered: bool, symmetric: bool) -> dict[str, np.ndarray]:
    package = module(
        path / "auto_gptq" / "nn_modules" / "qlinear" / ("qlinear_cuda.py" if reordered else "qlinear_cuda_old.py")
    )
    group, generator = 32, torch.Generator().manual_seed(3)
    layer, scales, zeros = linear(generator, group, True)
    if symmetric:
        zeros[:] = 8
    order = torch.arange(COLUMNS) // group
    if reordered:
        order = order[torch.randperm(COLUMNS, generator=generator)]
    bounds = (scales[:, order] * (0 - zeros[:, order]), scales[:, order] * (15 - zeros[:, order]))
    layer.weight.data = torch.minimum(torch.maximum(layer.weight.data, bounds[0]), bounds[1])
    made = package.QuantLinear(4, group, COLUMNS, ROWS, False)
    made.pack(layer.half(), scales.half(), zeros.half(), order.int())
    decoded = made.half()(torch.eye(COLUMNS, dtype=torch.float16)).T
    parts = {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales, "g_idx": made.g_idx, "decoded": decoded}
    return {name: part.detach().numpy() for name, part in parts.items()}


def by_awq(path: Path) -> dict[str, np.ndarray]:
    for name in ("awq", "awq.utils"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["awq.utils.packing_utils"] = packing = module(path / "awq" / "utils" / "packing_utils.py")
    for name, function in (("module", "try_import"), ("utils", "get_best_device")):
        sys.modules[f"awq.utils.{name}"] = types.ModuleType(name)
        answer = (None, "") if function == "try_import" else "cpu"
        setattr(sys.modules[f"awq.utils.{name}"], function, lambda *_, answer=answer: answer)
    package, group = module(path / "awq" / "modules" / "linear" / "gemm.py"), 32
    layer, scales, zeros = linear(torch.Generator().manual_seed(4), group, True)
    made = package.WQLinear_GEMM.from_linear(layer, 4, group, False, scales.T.contiguous(), zeros.T.contiguous())
    decoded = packing.dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, group).T
    parts = {"qweight": made.qweight, "qzeros": made.qzeros, "scales": made.scales, "decoded": decoded.contiguous()}
    return {name: part.detach().numpy() for name, part in parts.items()}


def main(arguments: Arguments) -> None:
    found = {
        "gptq": by_gptq(arguments.gptq, reordered=False, symmetric=False),
        "gptq_symmetric": by_gptq(arguments.gptq, reordered=False, symmetric=True),
        "gptq_reordered": by_gptq(arguments.gptq, reordered=True, symmetric=False),
        "awq": by_awq(arguments.awq),
    }
    flat = {f"{kind}/{name}": array for kind, parts in found.items() for name, array in parts.items()}
    np.savez_compressed(GOLDENS / "gptq_awq.npz", **flat)
    for name, array in flat.items():
        print(name, array.dtype, array.shape)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
