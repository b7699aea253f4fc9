"""What XLA's plan leaves out on CPU: arrays that a kernel library makes for itself while it runs.

XLA for CPU hands groups of operations with a matrix product or a sum to YNNPACK, which holds what lies between them (the
softmax's exponentials before the product with the values, or before their sum over the vocabulary in the loss) in memory of
its own, outside of the plan.
"""

from __future__ import annotations

import math
import re

_COMPUTATION = re.compile(r"^%(?P<name>[\w.\-]+) \(.*?\{\n(?P<body>.*?)^\}", re.MULTILINE | re.DOTALL)
_INSTRUCTION = re.compile(
    r"^ +%(?P<name>[\w.\-]+) = (?P<type>[a-z]+)(?P<bits>\d*)\w*\[(?P<shape>[\d,]*)\]\S* (?P<kind>[\w\-]+)", re.MULTILINE
)
_HANDED_OVER = re.compile(r"calls=%([\w.\-]+),.*__ynn_fusion")


def kernel_scratch(program: str) -> int:
    """Bytes of the largest array inside a group that a kernel library runs, by the text of a compiled program; 0 off CPU.

    One such array at a time is what runs of the library take beyond the plan, apart from packed operands, which are small
    beside it (`experiments/check_estimate.py` measures that).
    """
    groups = set(_HANDED_OVER.findall(program))
    bodies = [found["body"] for found in _COMPUTATION.finditer(program) if found["name"] in groups]
    # A sum of products (the norm of the gradients) is one kernel; a sum of exponentials makes them first.
    return max((_largest_inside(body, () if " dot(" in body else ("exponential",)) for body in bodies), default=0)


def _largest_inside(body: str, kinds: tuple[str, ...]) -> int:
    """The largest array, of all or these kinds; parameters and the result are in the plan, also under another shape."""
    result = re.search(r"ROOT \S+ = \S+ bitcast\(%([\w.\-]+)\)", body)
    outside = {result[1]} if result else set()
    return max(
        (
            math.prod(int(n) for n in found["shape"].split(",") if n) * max(int(found["bits"] or 8) // 8, 1)
            for found in _INSTRUCTION.finditer(body)
            if (found["kind"] in kinds if kinds else found["kind"] not in ("parameter", "constant"))
            if found["name"] not in outside
        ),
        default=0,
    )
