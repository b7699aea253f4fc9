"""Which mesh to use for 8, 70 and 405 billion parameters on 8, 64 and 512 devices, computed without the devices.

    python experiments/mesh_report.py [--models llama-3.1-8b] [--devices 8 64] [--hardware h200 tpu-v5p]

Every training step is compiled for simulated devices, as `llama-jax estimate --hardware` does: one row of 8,192 tokens per
device, bfloat16 over float32 parameters, AdamW, full rematerialization. For each mesh the report has the memory per device,
the bytes that a device sends, and the minimum that the strategy needs. For each hardware it has whether the step fits, its
minimum seconds with perfect overlap and without overlap, and the resulting share of the peak (MFU). These are bounds from
datasheets, not predictions. Writes ``experiments/results/mesh_report.json`` and a table in ``.md``.
"""

from __future__ import annotations

import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro
from measuring import write_rows

RESULTS = Path(__file__).parent / "results"
MESHES = {
    8: ("fsdp=8", "fsdp=2,tensor=4", "tensor=8"),
    64: ("fsdp=64", "data=8,fsdp=8", "fsdp=8,tensor=8"),
    512: ("fsdp=512", "data=8,fsdp=64", "fsdp=64,tensor=8", "data=8,fsdp=8,tensor=8"),
}


@dataclass(frozen=True)
class Arguments:
    """Compile training steps for many meshes and compare them."""

    models: tuple[str, ...] = ("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b")
    devices: tuple[int, ...] = (8, 64, 512)
    hardware: tuple[str, ...] = ("h100", "h200", "tpu-v5p", "tpu-v6e")
    length: int = 8192
    """Tokens per row; each device has one row."""
    output: Path = RESULTS / "mesh_report.json"


def look(model: str, mesh_sizes: str, length: int, hardware: tuple[str, ...]) -> dict[str, Any]:
    """Compile one step and bound its time on every hardware."""
    from llama_jax import preset
    from llama_jax.analysis.collectives import find_collectives, sum_traffic
    from llama_jax.analysis.hardware import hardware_by_name
    from llama_jax.analysis.memory import train_programs
    from llama_jax.analysis.roofline import least_traffic, training_roofline
    from llama_jax.parallel.mesh import make_mesh, parse_mesh

    config, sizes = preset(model), parse_mesh(mesh_sizes)
    batch, mesh = sizes.devices, make_mesh(sizes)
    started = time.perf_counter()
    (program,) = train_programs(config, mesh, batch, length, dtype="bfloat16", remat="full")
    compiled = program.compile(accelerator=True)
    memory = program.memory(compiled, accelerator=True)
    found = find_collectives(compiled.as_text() or "", mesh)
    seconds = time.perf_counter() - started
    least = least_traffic(config, sizes, batch, length, "bfloat16")
    bounds = {}
    for name in hardware:
        chip = hardware_by_name(name)
        step = (config, sizes, batch, length, "bfloat16", "full", chip)
        bounds[name] = {"share_of_memory": round(memory.total / chip.memory, 3), "fits": chip.holds(memory.total)}
        for kind, exchanges in (("compiled", found), ("least", least)):
            bound = training_roofline(*step, exchanges)
            bounds[name][kind] = {part: round(value, 4) for part, value in asdict(bound).items()} | {
                "limit": bound.limit,
                "mfu_overlapped": round(bound.utilization(bound.overlapped), 3),
                "mfu_apart": round(bound.utilization(bound.apart), 3),
            }
    return {
        "model": model,
        "mesh": mesh_sizes,
        "devices": sizes.devices,
        "batch": batch,
        "length": length,
        "compile_seconds": round(seconds, 1),
        "bytes_per_device": asdict(memory) | {"total": memory.total},
        "sent": {
            f"{row.opcode} over {','.join(row.axes)}": {"count": row.count, "bytes": int(row.sent_if_scattered)}
            for row in sum_traffic(found)
        },
        "least_sent": int(sum(one.count * one.sent for one in least)),
        "hardware": bounds,
    }


def as_table(rows: list[dict[str, Any]], hardware: tuple[str, ...]) -> str:
    """A line for each mesh, with the maximum MFU on each hardware, with and without overlap, or the share of its memory."""
    heads = ["model", "mesh", "GB per device", "GB sent", "least", *hardware, "compiled in"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in rows:
        sent = sum(one["bytes"] for one in row["sent"].values())
        cells = [row["model"], row["mesh"], f"{row['bytes_per_device']['total'] / 1e9:,.1f}"]
        cells += [f"{sent / 1e9:,.0f}", f"{row['least_sent'] / 1e9:,.0f}"]
        for name in hardware:
            found = row["hardware"][name]
            if found["fits"]:
                cells.append(f"{found['compiled']['mfu_overlapped']:.0%} to {found['compiled']['mfu_apart']:.0%}")
            else:
                cells.append(f"{found['share_of_memory']:.2f} x its memory")
        lines.append("| " + " | ".join([*cells, f"{row['compile_seconds']:.0f} s"]) + " |")
    return "\n".join(lines)


def main(arguments: Arguments) -> None:
    from llama_jax.cli.estimate import simulate_devices

    simulate_devices(max(arguments.devices))
    import jax

    rows = []
    for model in arguments.models:
        for devices in arguments.devices:
            for mesh in MESHES[devices]:
                rows.append(look(model, mesh, arguments.length, arguments.hardware))
                print(as_table(rows[-1:], arguments.hardware).splitlines()[-1], flush=True)
                jax.clear_caches()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    write_rows(arguments.output, {"jax": jax.__version__, "peak_resident_bytes": peak}, "steps", rows)
    arguments.output.with_suffix(".md").write_text(as_table(rows, arguments.hardware) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
