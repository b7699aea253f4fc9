"""One product of a few rows with a quantized matrix, in several ways: GB/s of the stored bytes."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from gpu_parts.run import Row, Run
from gpu_parts.timing import seconds, spread, temporary_memory
from llama_jax.ops.weights import quantized_matmul as library
from llama_jax.ops.weights.format_spec import QuantFormat
from llama_jax.ops.weights.formats import QUANT_FORMATS

Product = Callable[[QuantFormat, jax.Array, Any], jax.Array]


def by_weights(form: QuantFormat, x: jax.Array, planes: Any) -> jax.Array:
    """Sums of products, each weight decoded by itself."""
    dense = form.decode(*planes)
    return jnp.stack([jnp.sum(dense * row.astype(jnp.float32), axis=-1) for row in x])


def by_words(form: QuantFormat, x: jax.Array, planes: Any) -> jax.Array:
    assert form.words is not None
    return form.words.multiply(x, planes)


def in_the_matmul(form: QuantFormat, x: jax.Array, planes: Any) -> jax.Array:
    """Conversion inside a matmul and the scales afterwards, padded to two rows: one would be multiplied in float32."""
    values, scales = planes
    rows = jnp.pad(x, ((0, max(0, 2 - len(x))), (0, 0)))
    return (library._dot(rows, values.astype(x.dtype)) * scales)[: len(x)]


def dense(form: QuantFormat, x: jax.Array, planes: Any) -> jax.Array:
    """A bfloat16 matrix of the same shape."""
    return library._dot(x, planes[0])


def ragged(form: QuantFormat, x: jax.Array, planes: Any) -> jax.Array:
    """tokamax's grouped matmul of a bfloat16 matrix, with one group."""
    import tokamax

    sizes = jnp.full(1, len(x), jnp.int32)
    return tokamax.ragged_dot(x, planes[0].T[None], sizes, preferred_element_type=jnp.float32)


def ways(form: QuantFormat | None, rows: int) -> dict[str, Product]:
    """The products to compare; `form` is None for bfloat16."""
    if form is None:
        return {"dense": dense} | ({"tokamax": ragged} if importlib.util.find_spec("tokamax") else {})
    products: dict[str, Product] = {"library": lambda form, x, planes: library.multiply(x, planes, form)}
    if form.words is not None and rows <= 8:
        products["words"] = by_words
    if form.has_row_scales:
        products["in the matmul"] = in_the_matmul
    elif rows == 1:
        products["weights"] = by_weights
    if not form.has_row_scales and rows > 1:
        products["chunks"] = lambda form, x, planes: library._by_chunks(x, planes, form)
    return products


def matmuls(run: Run) -> Iterator[Row]:
    """Every way for every format and number of rows, the format's best-known rows first."""
    plan = run.plan
    for rows in plan.product_rows:
        for matrix, shape in plan.products.items():
            for name in ("bfloat16", *plan.product_formats):
                form = QUANT_FORMATS.get(name)
                for way, product in ways(form, rows).items():
                    row = {"rows": rows, "matrix": matrix, "format": name, "way": way}
                    yield run.attempt(row, partial(measure, run, form, shape, rows, product))


def measure(run: Run, form: QuantFormat | None, shape: tuple[int, int], rows: int, product: Product) -> Row:
    """Time the products of several matrices with as many different factors."""
    copies = run.plan.product_copies
    planes = planes_of(form, shape)
    xs = [jax.random.normal(jax.random.key(i), (rows, shape[1]), jnp.bfloat16) for i in range(copies)]
    weights = [random_planes(jax.random.key(i), planes) for i in range(copies)]
    multiply_all = jax.jit(lambda xs, weights: [product(form, x, planes) for x, planes in zip(xs, weights, strict=True)])
    compiled = multiply_all.lower(xs, weights).compile()
    times = seconds(lambda: compiled(xs, weights), run.plan.repetitions, calls=5)
    taken = statistics.median(times) / copies
    stored = sum(plane.nbytes for plane in weights[0])
    stored -= sum(plane.nbytes // 2 for plane in weights[0] if plane.dtype == jnp.int4)  # `nbytes` counts a byte for each
    copy = run.found("yardsticks", "value", name="copy")
    return {
        "us": 1e6 * taken,
        "gb_per_s": stored / taken / 1e9,
        **({} if copy is None else {"share_of_copy": stored / taken / 1e9 / copy}),
        "spread": spread(times),
        **temporary_memory(compiled),
    }


def planes_of(form: QuantFormat | None, shape: tuple[int, int]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the planes of a matrix as the device stores them."""
    if form is None:
        return (jax.ShapeDtypeStruct(shape, jnp.bfloat16),)
    packed = jax.default_backend() == "cpu"
    return tuple(
        jax.ShapeDtypeStruct(*(plane.packed_shape(shape) if packed else (plane.shape(shape), plane.dtype)))
        for plane in form.planes
    )


def random_planes(key: jax.Array, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[jax.Array, ...]:
    """Random bits, and small floats."""

    def fill(key: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(like.dtype, jnp.floating):
            return (0.01 * jax.random.normal(key, like.shape)).astype(like.dtype)
        return jax.random.bits(key, like.shape, jnp.uint8).astype(like.dtype)

    return tuple(jax.jit(fill, static_argnums=1)(key, like) for like in shapes)
