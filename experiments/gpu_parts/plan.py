"""The sizes of `gpu_report`: for an accelerator, and small ones without."""

from __future__ import annotations

from dataclasses import dataclass, replace

import llama_jax

GOAL_SHAPE = "llama-3-8b"


@dataclass(frozen=True)
class Training:
    """A shape to train, and candidates of settings."""

    shape: str
    length: int
    candidates: tuple[tuple[str, int, bool], ...]
    """(remat policy, rows, whether layers are unrolled), the least memory first; those after one that does not fit are
    skipped."""
    parameters: str = "float32"
    """Dtype of parameters, gradients and moments: 16 bytes per parameter in float32, 8 in bfloat16."""


@dataclass(frozen=True)
class Heads:
    """The shape of attention, and the lengths to measure, the shortest first."""

    lengths: tuple[int, ...]
    queries: int
    keys: int
    width: int
    batch: int = 1


@dataclass(frozen=True)
class Plan:
    """The sizes to measure."""

    shapes: dict[str, llama_jax.LlamaConfig]
    trainings: tuple[Training, ...]
    decodes: tuple[tuple[str, str], ...]  # (shape, weights)
    decode_batches: tuple[int, ...]
    prefills: tuple[tuple[int, int], ...]  # (rows, tokens of each)
    heads: Heads  # for attention
    peer_shapes: tuple[str, ...]  # for transformers
    options_shape: str  # for the compiler options
    served_shapes: tuple[str, ...]
    served_rows: int
    compared_requests: int
    quantized_shape: str
    formats: tuple[str, ...]
    products: dict[str, tuple[int, int]]  # [N, D] of matrices to multiply
    product_formats: tuple[str, ...]
    product_rows: tuple[int, ...]
    product_copies: int  # different matrices in one program, so that none stays in a cache
    repetitions: int
    new_tokens: int
    copy_bytes: int
    matrix_size: int
    small_programs: bool = False
    capacity: int = 256
    prompt_tokens: int = 64

    def limited_to(self, shapes: tuple[str, ...]) -> Plan:
        """The plan with only these shapes; with all if there are none."""
        if not shapes:
            return self
        return replace(
            self,
            shapes={shape: self.shapes[shape] for shape in shapes},
            trainings=tuple(case for case in self.trainings if case.shape in shapes),
            decodes=tuple(case for case in self.decodes if case[0] in shapes),
            peer_shapes=tuple(shape for shape in self.peer_shapes if shape in shapes),
            served_shapes=tuple(shape for shape in self.served_shapes if shape in shapes),
            options_shape=self.options_shape if self.options_shape in shapes else shapes[0],
            quantized_shape=self.quantized_shape if self.quantized_shape in shapes else shapes[0],
        )


# The goal's shape comes first, in case the time runs out.
LARGE = Plan(
    shapes={name: llama_jax.preset(name) for name in (GOAL_SHAPE, "tinyllama-1.1b")},
    decodes=(
        *((GOAL_SHAPE, weights) for weights in ("bfloat16", "int8", "q4_0", "q4_k")),
        ("tinyllama-1.1b", "bfloat16"),
    ),
    decode_batches=(1, 8, 64),
    prefills=((1, 512), (1, 4096), (64, 128)),
    # The states take 18 and 64 GB.
    trainings=(
        Training("tinyllama-1.1b", 2048, (("dots", 8, False), ("dots", 8, True), ("dots", 16, True), ("dots", 16, False))),
        Training(GOAL_SHAPE, 2048, (("full", 4, False), ("dots", 4, True)), parameters="bfloat16"),
    ),
    heads=Heads((2048, 4096, 8192, 16384, 32768), queries=32, keys=8, width=128),  # those of llama-3-8b
    peer_shapes=(GOAL_SHAPE, "tinyllama-1.1b"),
    options_shape="tinyllama-1.1b",
    served_shapes=(GOAL_SHAPE,),
    served_rows=64,
    compared_requests=24,
    quantized_shape=GOAL_SHAPE,
    formats=("int8", "q4_0", "q4_k", "int4", "fp8", "q8_0", "nf4", "q5_0", "q4_1"),
    products={"gate or up": (14336, 4096), "down": (4096, 14336)},  # of llama-3-8b
    product_formats=("int8", "q4_0", "int4", "q8_0", "q4_k"),
    product_rows=(1, 2, 4, 8, 64),
    product_copies=8,
    repetitions=5,
    new_tokens=64,
    copy_bytes=1 << 32,
    matrix_size=8192,
)
SMALL_GQA = llama_jax.LlamaConfig(
    vocab_size=1000,
    dim=256,
    n_layers=2,
    n_heads=8,
    n_kv_heads=2,
    hidden_dim=704,
    max_seq_len=512,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_embeddings=False,
)
SMALL = Plan(
    shapes={"stories-260k": llama_jax.preset("stories-260k"), "small-gqa": SMALL_GQA},
    decodes=(("small-gqa", "bfloat16"), ("small-gqa", "int8"), ("small-gqa", "q4_0"), ("stories-260k", "bfloat16")),
    decode_batches=(1, 4),
    prefills=((1, 64), (4, 32)),
    trainings=(
        Training("stories-260k", 32, (("full", 2, False),)),
        Training("stories-260k", 32, (("dots", 2, True),), parameters="bfloat16"),
    ),
    heads=Heads((64, 96), queries=4, keys=2, width=16),
    peer_shapes=("small-gqa",),
    options_shape="small-gqa",
    served_shapes=("small-gqa",),
    served_rows=4,
    compared_requests=6,
    quantized_shape="small-gqa",
    formats=("int8", "q4_0", "q8_0"),
    products={"small": (96, 256)},
    product_formats=("int8", "q4_0"),
    product_rows=(1, 4),
    product_copies=1,
    repetitions=3,
    new_tokens=16,
    copy_bytes=1 << 26,
    matrix_size=512,
    small_programs=True,
)
