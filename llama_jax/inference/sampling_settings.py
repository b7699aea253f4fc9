"""The settings of sampling. A field here is an option everywhere: in Python, on the command line, in HTTP requests and in
`/openapi.json`; what it does is in `inference.sampling`. Without JAX and NumPy, so that the command line need not import
them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

from llama_jax.errors import GenerationError, short_repr
from llama_jax.settings import Bounds, at_least, number_fields

if TYPE_CHECKING:
    import numpy as np

PerRow = Any  # a number, or an array or sequence of one number per row; a field is `Annotated[PerRow, int or float, Bounds]`
SMALLEST_TEMPERATURE, SMALLEST_MIN_P, SMALLEST_TOP_P = (
    1e-6,
    1e-30,
    1e-9,
)  # smaller values count as 0, or as the smallest possible set


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled. Each field is one value for all rows or one per row; `per_row` checks them.

    Attributes:
      temperature: divides the logits. 0 always takes the most probable token, after the repetition penalty, and ignores the
        other fields.
      top_k: keep the k most probable tokens (and those tied with the last); 0 and -1 keep all.
      top_p: keep the most probable tokens until their probabilities sum to p (Holtzman et al. 2020, section 3.1), and those
        tied with the last (transformers drops some of them); 1 keeps all.
      min_p: keep tokens at least min_p times as probable as the most probable (Nguyen et al. 2024); 0 keeps all.
      repetition_penalty: values above 1 make tokens that the row already contains less probable: their logits are divided by
        it where positive and multiplied where negative (Keskar et al. 2019, section 4.1); 1 changes nothing.
      seed: seed of the row's random stream, which does not depend on other rows. For n different samples of one prompt, pass
        n seeds: `seed=range(n)`.
    """

    temperature: Annotated[PerRow, float, Bounds(0, 100)] = 0.0
    top_k: Annotated[PerRow, int, at_least(-1)] = 0
    top_p: Annotated[PerRow, float, Bounds(0, 1)] = 1.0
    min_p: Annotated[PerRow, float, Bounds(0, 1)] = 0.0
    repetition_penalty: Annotated[PerRow, float, Bounds(0.01, 1e6)] = 1.0
    seed: Annotated[PerRow, int, Bounds(0, 2**32 - 1)] = 0

    def replace(self, **fields: PerRow) -> Sampling:
        """The same settings with other values of some fields."""
        return replace(self, **fields)

    def per_row(self, batch: int) -> Sampling:
        """The same settings as arrays of `batch` values.

        Raises:
          GenerationError: an invalid value, or a field with the wrong number of rows; the message names the field.
        """
        import numpy as np

        numbers = number_fields(Sampling)
        arrays = {
            field.name: _to_array(
                field.name, getattr(self, field.name), batch, numbers[field.name].type, numbers[field.name].bounds
            )
            for field in fields(self)
        }
        arrays["temperature"] *= arrays["temperature"] >= SMALLEST_TEMPERATURE
        arrays["top_k"] = np.maximum(arrays["top_k"], 0)
        arrays["top_p"] = np.maximum(arrays["top_p"], SMALLEST_TOP_P)
        arrays["min_p"] *= arrays["min_p"] >= SMALLEST_MIN_P
        return Sampling(**arrays)

    def is_greedy(self) -> bool:
        """Whether every row takes its most probable token, without a penalty. Only for numbers and NumPy arrays."""
        import numpy as np

        return bool(np.all(np.equal(self.temperature, 0)) and np.all(np.equal(self.repetition_penalty, 1)))


def _to_array(name: str, setting: PerRow, batch: int, number_type: type, bounds: Bounds) -> np.ndarray:
    """A setting, one number or one per row, as an array of `batch` numbers."""
    import numpy as np

    numbers = np.asarray(setting)
    requirement = bounds.describe(np.inf)
    if numbers.dtype.kind not in "iuf":
        raise GenerationError(f"{name}={short_repr(setting, 40)} must be a number, {requirement}")
    for number in numbers.flat:
        if not bounds.contain(number) or (number_type is int and number != np.floor(number)):
            raise GenerationError(f"{name}={number} must be {'an integer, ' if number_type is int else ''}{requirement}")
    if numbers.shape not in ((), (batch,)):
        raise GenerationError(f"{name} has shape {numbers.shape} for a batch of {batch}: give one value or one per row")
    dtype = np.float32 if number_type is float else np.int32 if bounds.maximum < 2**31 else np.uint32
    return np.broadcast_to(numbers, (batch,)).astype(dtype)
