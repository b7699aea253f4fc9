"""What XLA's plan leaves out on CPU: arrays that a kernel library makes for itself while it runs.

XLA for CPU hands groups of operations with a matrix product to YNNPACK, which holds what lies between them (the softmax's
exponentials before the product with the values, say) in memory of its own, outside of the plan.
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
    return max((_largest_inside(body) for body in bodies if " dot(" in body), default=0)


def _largest_inside(body: str) -> int:
    """Parameters and the result belong to the plan, also a result under another shape."""
    result = re.search(r"ROOT \S+ = \S+ bitcast\(%([\w.\-]+)\)", body)
    outside = {result[1]} if result else set()
    return max(
        (
            math.prod(int(n) for n in found["shape"].split(",") if n) * max(int(found["bits"] or 8) // 8, 1)
            for found in _INSTRUCTION.finditer(body)
            if found["kind"] not in ("parameter", "constant") and found["name"] not in outside
        ),
        default=0,
    )
