"""What ``llama-jax estimate`` prints: tables, or one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llama_jax.analysis.collectives import Collective
    from llama_jax.analysis.findings import Findings
    from llama_jax.analysis.hardware import Hardware
    from llama_jax.analysis.roofline import DeviceExchange, Roofline


LABELS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state (AdamW)",
    "cache": "cache",
    "temporaries": "activations and temporaries",
    "scratch": "scratch of CPU kernels",
}


def as_json(
    about: dict[str, Any],
    found: dict[str, Findings],
    least: list[DeviceExchange],
    hardware: Hardware | None,
    bounds: dict[str, Roofline],
    *,
    own: bool,
) -> str:
    """One object: the request, for each program the bytes per device and the communication, and the bounds."""
    from llama_jax.analysis.collectives import add_up

    programs = {name: asdict(one.memory) | {"total": one.memory.total} for name, one in found.items()}
    peak = max((one.memory.total for one in found.values()), default=0)
    sums = {"bytes_per_device": programs, "peak_per_device": peak, "peak_of_mesh": peak * about["devices"]}
    traffic = {name: [asdict(row) for row in add_up(one.collectives)] for name, one in found.items()}
    needed = [asdict(row) | {"sent": row.sent} for row in least]
    rooflines = {
        name: asdict(bound)
        | {"limit": bound.limit, "overlapped": bound.overlapped, "apart": bound.apart}
        | {"mfu_overlapped": bound.utilization(bound.overlapped), "mfu_apart": bound.utilization(bound.apart)}
        for name, bound in bounds.items()
    }
    fits = hardware is not None and not about["refused"] and hardware.holds(peak)
    plan = {"hardware": asdict(hardware), "fits": fits, "rooflines": rooflines} if hardware else {}
    seen = {"programs": {name: one.as_dict() for name, one in found.items()}} if own else {}
    return json.dumps(about | sums | {"exchanged": traffic, "least_exchanged": needed} | plan | seen)


def as_table(about: dict[str, Any], found: dict[str, Findings], *, for_cpu: bool, own: bool) -> str:
    """A column for each program, and one for all devices together while the program that needs the most memory runs."""
    from llama_jax.parallel.mesh import MeshSizes

    columns = {name: asdict(one.memory) | {"total": one.memory.total} for name, one in found.items()}
    devices = about["devices"]
    if devices > 1 and found:
        worst = max(found, key=lambda name: found[name].memory.total)
        columns[f"{worst}, all {devices}"] = {part: size * devices for part, size in columns[worst].items()}
    rows = [("GB per device", [*columns])]
    for part, label in (LABELS | {"total": "total"}).items():
        if any(column[part] for column in columns.values()):
            rows.append((label, [f"{column[part] / 1e9:,.3f}" for column in columns.values()]))
    width = 3 + max(len(cell) for _, cells in rows for cell in cells)

    mesh = MeshSizes(**about["mesh"])
    scores = "Attention of long rows is planned by blocks, whose scores are never in memory at once; so are GPU kernels'."
    if mesh.context > 1:
        scores = "Where rows are divided over context, attention has the scores of a few hundred tokens in memory at once."
    asked = [about["model"], about["mode"], f"batch {about['batch']} x {about['length']}", about["dtype"]]
    asked += [f"weights {about['quantize']}"] if about["quantize"] != "none" else []
    asked += [f"adapters of rank {about['lora']}"] if about["lora"] else []
    asked += [f"remat {about['remat']}"] if about["remat"] else []
    asked += ["packed"] if about["packed"] else []
    asked += [f"accumulate {about['accumulate']}"] if (about["accumulate"] or 1) > 1 else []
    lines = [
        " · ".join([*asked, str(mesh)]),
        f"{about['parameter_count']:,} parameters · cache {about['cache_bytes_per_token']:,} bytes per token",
        "",
    ]
    if found:
        lines += [*(f"{label:<28}" + "".join(f"{cell:>{width}}" for cell in cells) for label, cells in rows), ""]
    lines += [f"The compiler says that it does not fit: {message}" for message in about["refused"].values()]
    if own:
        lines.append(f"Compiled by {about['compiler']}: this is its plan.")
        return "\n".join(lines)
    lines += [scores, "Temporaries are what XLA plans for CPU devices; GPU and TPU backends fuse differently."]
    if about["note"]:
        lines.append(f"Their own compiler was not asked: {about['note']}")
    if about["dtype"] == "bfloat16" and for_cpu:
        lines.append("XLA for CPU keeps many bfloat16 arrays in float32 as well: --hardware NAME plans without that.")
    return "\n".join(lines)


def programs_table(found: dict[str, Findings]) -> str:
    """What the accelerator's compiler made of each program: kernels, copies, and what a token reads."""
    lines = []
    for name, one in found.items():
        lines += ["", f"{name}: compiled in {one.seconds:.0f} s"]
        if one.attention:
            lines.append(f"  attention: {'; '.join(one.attention)}")
        if one.calls:
            calls = ", ".join(f"{kernel} in {count} place{'s' * (count > 1)}" for kernel, count in one.calls.items())
            lines.append(f"  kernels called: {calls}")
        if one.asynchronous is not None and one.overlapped is not None:
            apart = f"{one.asynchronous:.0%} by collectives that are started and waited for apart"
            lines.append(f"  of the bytes sent {apart}, {one.overlapped:.0%} while matrices are multiplied")
        if one.copies:
            lines.append(f"  copies of at least 1 MiB: {len(one.copies)}, {one.copied / 1e9:,.3f} GB in all; the largest")
            for copy in sorted(one.copies, key=lambda copy: -copy.bytes * copy.times)[:3]:
                times = f" x {copy.times}" if copy.times > 1 else ""
                lines.append(f"    {copy.shape} {copy.bytes / 1e9:,.3f} GB{times}{', in a loop' if copy.in_loop else ''}")
        if one.token is not None and one.read_ratio is not None and one.kernels_per_layer is not None:
            lines.append(
                f"  a token of each row reads {one.token.read / 1e9:,.3f} GB, {one.read_ratio:.3f} of the least (weights and"
                f" cache: {one.per_token / 1e9:,.3f} GB), and writes {one.token.written / 1e9:,.3f} GB"
            )
            lines.append(f"  {one.kernels_per_layer:.1f} kernels a layer, {one.token.kernels:,} in all")
    return "\n".join(lines)


def exchange_table(n_layers: int, found: dict[str, Findings], least: list[DeviceExchange], *, own: bool) -> str:
    """The communication of a device while each program runs once, and the least for comparison."""
    from llama_jax.inference.generate import CHUNK

    exchanged = {name: list(one.collectives) for name, one in found.items()}
    lines = []
    for program, members in exchanged.items():
        if members:
            lines += ["", *_kinds(program, members, n_layers)]
    lines += ["", *_least_of_each(least)] if least else []
    lines += ["", *_sums([one for members in exchanged.values() for one in members], least)] if least else []
    lines += ["", "Sent is what a device sends by a ring. Where an all-reduce is followed by a slice, `scattered` is what a"]
    lines += [
        "reduce-scatter would send." if own else "backend sends that forms a reduce-scatter, which XLA for CPU does not."
    ]
    if any(not one.is_counted for members in exchanged.values() for one in members):
        lines.append(f"One turn is counted of loops whose number of turns is not fixed: {CHUNK} tokens of each row.")
    return "\n".join(lines)


def _kinds(program: str, members: list[Collective], n_layers: int) -> list[str]:
    """A line for each kind, axes and type of elements."""
    columns = ("forward", "again", "backward", "others", "GB result", "GB sent", "scattered")
    rows: dict[tuple[str, str, str], list[Collective]] = {}
    for one in members:
        rows.setdefault((",".join(one.axes), one.kind, "+".join(one.dtypes)), []).append(one)
    lines = [f"{program + ': exchanges in each layer, and others':<48}" + "".join(f"{c:>11}" for c in columns)]
    for (axes, kind, dtypes), row in sorted(rows.items()):
        layered = [one for one in row if n_layers in one.loops]
        counts = [sum(one.count for one in layered if one.phase == phase) for phase in columns[:3]]
        cells = [*(f"{count / n_layers:g}" for count in counts), f"{sum(one.count for one in row) - sum(counts):,}"]
        sizes = (
            sum(one.count * one.bytes for one in row),
            sum(one.count * one.sent for one in row),
            sum(one.count * one.sent_if_scattered for one in row),
        )
        cells += [f"{size / 1e9:,.3f}" for size in sizes]
        lines.append(f"  {axes + ' ' + kind + ' ' + dtypes:<46}" + "".join(f"{cell:>11}" for cell in cells))
    return lines


def _least_of_each(least: list[DeviceExchange]) -> list[str]:
    lines = [f"{'the least that this strategy exchanges':<81}{'count':>11}{'GB sent':>11}"]
    for one in least:
        name = f"{','.join(one.axes)} {one.kind}: {one.what}"
        lines.append(f"  {name:<79}{one.count:>11,}{one.count * one.sent / 1e9:>11,.3f}")
    return lines


def _sums(members: list[Collective], least: list[DeviceExchange]) -> list[str]:
    """A line for each axis, or group of axes, of the mesh."""
    lines = [f"{'GB sent by a device along':<48}" + "".join(f"{c:>11}" for c in ("compiled", "scattered", "least"))]
    for axes in sorted({one.axes for one in members} | {one.axes for one in least}):
        along = [one for one in members if one.axes == axes]
        sums = (
            sum(one.count * one.sent for one in along),
            sum(one.count * one.sent_if_scattered for one in along),
            sum(one.count * one.sent for one in least if one.axes == axes),
        )
        lines.append(f"  {','.join(axes):<46}" + "".join(f"{size / 1e9:>11,.3f}" for size in sums))
    return lines


def bound_table(hardware: Hardware, peak: int, bounds: dict[str, Roofline]) -> str:
    """Whether it fits, and the least seconds."""
    share = peak / hardware.memory
    beyond = hardware.network_bandwidth
    network = "" if beyond is None else f" and {beyond / 1e9:,.4g} GB/s beyond"
    lines = [
        "",
        f"{hardware.name}: {hardware.flops / 1e12:,.4g} TFLOP/s, memory {hardware.memory_bandwidth / 1e12:,.3g} TB/s, "
        f"links {hardware.link_bandwidth / 1e9:,.4g} GB/s between {hardware.domain:,} devices{network}",
        f"{peak / 1e9:,.1f} GB is {share:.0%} of its memory of {hardware.memory / 1e9:,.1f} GB: "
        + ("it fits" if hardware.holds(peak) else "it does not fit"),
    ]
    if bounds:
        names = "compute", "memory", "exchange", "overlapped", "apart"
        lines += ["", f"{'least seconds':<30}" + "".join(f"{name:>13}" for name in names)]
    for name, bound in bounds.items():
        parts = (bound.compute, bound.memory, bound.exchange, bound.overlapped, bound.apart)
        lines.append(f"{name:<30}" + "".join(f"{seconds:>13,.4g}" for seconds in parts))
        mfu = (f"{bound.utilization(seconds):.0%}" for seconds in parts[3:])
        lines.append(f"{'  MFU at most':<69}" + "".join(f"{share:>13}" for share in mfu))
    return "\n".join(lines)
