"""The model as a `flax.nnx.Module`, for trainers and tools that need one: the pure functions with the parameters inside."""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax import nnx
from jaxtyping import Array, Float, Integer

from llama_jax.config import LlamaConfig
from llama_jax.errors import ConfigError
from llama_jax.model.checks import check_no_hooks
from llama_jax.model.forward_options import ComputeOptions
from llama_jax.model.logits import logits
from llama_jax.model.lora import Lora, apply_adapters
from llama_jax.model.params import LlamaParams
from llama_jax.ops.platform import AnyArray


class LlamaModule(nnx.Module):
    """A model whose arrays are variables: `nnx.Param`, and `nnx.LoRAParam` for adapters.

    It is only a wrapper: a call is `llama_jax.logits`, and all other functions take `module.pure()`. `nnx.split`,
    `nnx.state`, `nnx.jit`, `nnx.grad` and `nnx.Optimizer` see a `LlamaParams` with a variable for each array, named by its
    fields, such as `params.blocks.attention.qkv`.

    Attributes:
      config, compute: as for `llama_jax.logits`.
      params: a `LlamaParams` of `nnx.Param`.
      adapters: a `LlamaParams` of `nnx.LoRAParam`, or None.
      lora: the settings of the adapters, or None.
    """

    def __init__(
        self,
        config: LlamaConfig,
        params: LlamaParams,
        adapters: LlamaParams | None = None,
        lora: Lora | None = None,
        *,
        compute: ComputeOptions = ComputeOptions(),
    ) -> None:
        """Wrap parameters, without a copy.

        Args:
          params: from `llama_jax.load`: dense, quantized, or with adapters already joined.
          adapters, lora: from `init_adapters` or `load_adapter`; train only adapters with `wrt=nnx.LoRAParam`.

        Raises:
          ConfigError: parameters with hooks; or only one of `adapters` and `lora`.
        """
        check_no_hooks(params)
        if (adapters is None) != (lora is None):
            raise ConfigError("adapters and lora belong together; pass both or neither")
        self.config, self.compute, self.lora = config, compute, lora
        self.params = nnx.data(jax.tree.map(nnx.Param, params))
        self.adapters = nnx.data(jax.tree.map(nnx.LoRAParam, adapters))

    def __call__(self, tokens: Integer[AnyArray, "B T"]) -> Float[Array, "B T V"]:
        """Logits of whole sequences, in float32 at least."""
        return logits(self.config, self.pure(), tokens, self.compute)

    def pure(self) -> LlamaParams:
        """The parameters for the pure functions: the same arrays, joined with the adapters if there are any."""
        params = nnx.as_pure(self.params)
        return params if self.lora is None else apply_adapters(params, nnx.as_pure(self.adapters), self.lora)

    def wrap_optimizer(self, optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
        """Wrap an optimizer that depends on parameter paths for `nnx.Optimizer(module, ..., wrt=...)`.

        `nnx.Optimizer` passes nested dictionaries, but optimizers from `make_optimizer` need the paths of a `LlamaParams`,
        which determine weight decay and Muon's updates. The wrapped optimizer gets {"params": Llama}, or {"adapters": Llama}
        with `wrt=nnx.LoRAParam`. Optax optimizers that treat all arrays alike need no wrapper.
        """
        inner = optax.with_extra_args_support(optimizer)
        trees = {name: nnx.graphdef(nnx.as_pure(getattr(self, name))) for name in ("params", "adapters")}

        def to_trees(state: nnx.State) -> dict[str, LlamaParams]:
            return {name: nnx.merge(trees[name], nested) for name, nested in nnx.as_pure(state).items()}

        def update(gradients: Any, state: Any, params: Any, **more: Any) -> tuple[nnx.State, Any]:
            updates, state = inner.update(to_trees(gradients), state, to_trees(params), **more)
            return nnx.state(updates), state

        return optax.GradientTransformationExtraArgs(lambda params: inner.init(to_trees(params)), update)
