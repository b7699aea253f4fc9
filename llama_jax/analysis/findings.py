"""A compiled program analysed: its memory, its kernels, and its unnecessary copies."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax

from llama_jax.analysis.collectives import Collective, find_collectives
from llama_jax.analysis.hlo import ProgramText
from llama_jax.analysis.memory import Memory, Program
from llama_jax.analysis.programs import Copy, Token, custom_calls, find_copies, token_of
from llama_jax.inference.generate import CHUNK
from llama_jax.ops.attention import observed


@dataclass(frozen=True)
class Findings:
    """Facts about a compiled program, per device.

    Attributes:
      memory: as its compiler plans it.
      seconds: of tracing and compiling.
      attention: the backends that were used, and why: "cudnn (on NVIDIA H200)".
      calls: kernels that are not the compiler's own, and the number of places that start them.
      collectives: in the order of the program.
      copies: of at least a mebibyte, that only move data.
      token: for a program that decodes, the costs of a token of each row; None if no loop over tokens was found in it.
      per_token: the least bytes that it could read for a token.
      layers: of the model.
    """

    name: str
    memory: Memory
    seconds: float
    attention: tuple[str, ...]
    calls: dict[str, int]
    collectives: tuple[Collective, ...]
    copies: tuple[Copy, ...]
    token: Token | None
    per_token: int
    layers: int

    @property
    def copied(self) -> int:
        """Bytes that all copies write in a run of the program, of one turn of loops that do not tell theirs."""
        return sum(copy.bytes * copy.times for copy in self.copies)

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a run of the program, by rings."""
        return sum(one.sent * one.count for one in self.collectives)

    @property
    def asynchronous(self) -> float | None:
        """Of the bytes that are sent, the share of collectives that are started and waited for apart; None without any."""
        return self._share([one for one in self.collectives if one.asynchronous])

    @property
    def overlapped(self) -> float | None:
        """Of the bytes that are sent, the share beside which matrices are multiplied; None without any."""
        return self._share([one for one in self.collectives if one.overlapped])

    def _share(self, collectives: list[Collective]) -> float | None:
        return sum(one.sent * one.count for one in collectives) / self.sent if self.sent else None

    @property
    def read_ratio(self) -> float | None:
        """Bytes read for a token over the least."""
        return self.token.read / self.per_token if self.token and self.per_token else None

    @property
    def kernels_per_layer(self) -> float | None:
        """Kernels that decoding starts for each layer and token."""
        return self.token.kernels_of_layers / self.layers if self.token and self.layers else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON: sizes in bytes."""
        kinds: dict[str, dict[str, int]] = {}
        for one in self.collectives:
            row = kinds.setdefault(
                f"{one.kind} over {','.join(one.axes)}", {"count": 0, "asynchronous": 0, "overlapped": 0, "sent": 0}
            )
            row["count"] += one.count
            row["asynchronous"] += one.count * one.asynchronous
            row["overlapped"] += one.count * one.overlapped
            row["sent"] += int(one.sent * one.count)
        token = None
        if self.token is not None:
            token = asdict(self.token) | {
                "least_read": self.per_token,
                "read_ratio": self.read_ratio,
                "kernels_per_layer": self.kernels_per_layer,
            }
        return {
            "bytes_per_device": asdict(self.memory) | {"total": self.memory.total},
            "compile_seconds": round(self.seconds, 1),
            "attention": list(self.attention),
            "calls": self.calls,
            "collectives": kinds,
            "asynchronous_share": None if self.asynchronous is None else round(self.asynchronous, 3),
            "overlapped_share": None if self.overlapped is None else round(self.overlapped, 3),
            "copies": {
                "count": len(self.copies),
                "bytes": self.copied,
                "largest": [asdict(c) for c in _largest(self.copies)],
            },
            "token": token,
        }


def examine(program: Program, *, accelerator: bool = False, flags: bool = True) -> Findings:
    """Compile a program for its mesh and analyse it.

    Args:
      accelerator, flags: see `Program.compile`.
    """
    started = time.perf_counter()
    with observed() as taken:
        compiled = program.compile(accelerator=accelerator, flags=flags)
    return look_at(program, compiled, time.perf_counter() - started, taken, accelerator=accelerator)


def look_at(
    program: Program,
    compiled: jax.stages.Compiled,
    seconds: float,
    attention: Mapping[str, str],
    *,
    accelerator: bool = False,
) -> Findings:
    """Facts about a program that was compiled in this many seconds.

    Args:
      attention: what `ops.attention.observed` found while the program was traced: ways to compute it, and why.
    """
    source = compiled.as_text() or ""
    text = ProgramText(source)
    return Findings(
        name=program.name,
        memory=program.memory(compiled, accelerator=accelerator),
        seconds=seconds,
        attention=tuple(f"{name} ({why})" for name, why in attention.items()),
        calls=dict(custom_calls(text)),
        collectives=tuple(find_collectives(source, program.mesh)),
        copies=tuple(find_copies(text)),
        token=_believed(token_of(text, program.layers, CHUNK, program.per_token), program.per_token)
        if program.per_token
        else None,
        per_token=program.per_token,
        layers=program.layers,
    )


def _believed(token: Token, least: int) -> Token | None:
    """None for what reads less than half of what any token must: a loop within a token was taken for that of tokens.

    So it is where a TPU's compiler makes a loop over rows of matmuls that each row has for itself.
    """
    return token if 2 * token.read >= least else None


def _largest(copies: tuple[Copy, ...], count: int = 4) -> list[Copy]:
    return sorted(copies, key=lambda copy: -copy.bytes * copy.times)[:count]
