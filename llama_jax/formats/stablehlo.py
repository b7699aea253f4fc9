"""An exported model: its programs as StableHLO, the weights, and a runner that needs JAX but not this library.

Two programs, for a fixed batch B and a cache of a fixed capacity:

    state, logits = prefill(weights, state, tokens, lengths, sampling)
    state, logits = decode(weights, state, sampling)

Every argument is an array or a flat dict of arrays, so that deserializing needs no type of this library. `prefill` reads
up to T more tokens of each row: `tokens` int32[B, T], padded on the right, of prompts with `lengths` int32[B] tokens in
total; rows whose prompt has ended do not change. `decode` reads the last sampled token of each row. Both sample the next
one, `state["token"]`, and return its logits, float32[B, V], for a sampler that replaces it.

They are traced for no particular platform (`target_platform`), so that they contain no custom kernels or calls.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import llama_jax
from llama_jax.config import LlamaConfig
from llama_jax.errors import CheckpointError, GenerationError, UserError, shown
from llama_jax.formats.huggingface import header
from llama_jax.formats.lazy_tensors import DTYPES
from llama_jax.formats.model_folder import new_output
from llama_jax.inference.checks import longrope_switch_length
from llama_jax.inference.compiled_decode import prefill_chunk_size
from llama_jax.inference.decode import PrefillState, compute_logits, init_prefill, mark_seen, prefill
from llama_jax.inference.sampling import Sampling, sample
from llama_jax.model.cache import CacheOptions
from llama_jax.model.checks import check_no_hooks, check_params, check_parts_found
from llama_jax.model.forward import forward
from llama_jax.model.forward_options import Positions, Sharding
from llama_jax.model.params import Llama
from llama_jax.model.trees import bytes_in_memory, restack_layers
from llama_jax.ops.platform import native_code, target_platform
from llama_jax.ops.weights.format_spec import pack_int4
from llama_jax.ops.weights.multi_lora import MultiLoraWeight
from llama_jax.parallel.padding import unpad_params
from llama_jax.storage import locate
from llama_jax.storage.atomic_write import free_bytes
from llama_jax.tokenizers import Tokenizer

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
DEFAULT_CONTEXT = 2048
PREFILL_ARGUMENTS = ("weights", "state", "tokens", "lengths", "sampling")
WEIGHTS, ABOUT, RUNNER, SUFFIX = "weights.safetensors", "export.json", "run.py", ".stablehlo"
KINDS = {dtype: kind for kind, dtype in DTYPES.items()}  # names of dtypes in safetensors
Arrays = dict[str, Any]


@dataclass(frozen=True)
class ExportedModel:
    """What `export_model` returns and `save` writes.

    Attributes:
      programs: "prefill" and "decode".
      weights: the arrays of the parameters by their paths in the tree, such as blocks.attention.qkv.
      about: the content of ``export.json``.
      tokenizer: its files are written next to the weights.
    """

    programs: dict[str, export.Exported]
    weights: Arrays
    about: dict[str, Any]
    tokenizer: Tokenizer | None

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        progress: Callable[[list[str]], Iterable[str]] = iter,
    ) -> None:
        """Write the folder: it appears only when completely written.

        Args:
          overwrite: replace a folder that contains only a model, or an exported one.
          progress: wraps the list of names of the weights, as `tqdm.tqdm` does.

        Raises:
          CheckpointError: something is at `path`, or the disk has no room.
        """
        where = locate(path)
        programs = {name: program.serialize() for name, program in self.programs.items()}
        needed, free = self.about["bytes"]["weights"] + sum(map(len, programs.values())), free_bytes(where)
        if needed > free:
            raise CheckpointError(f"{path} needs {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free; make room there")
        with new_output(where, folder=True, overwrite=overwrite) as folder:
            for name, content in programs.items():
                (folder / f"{name}{SUFFIX}").write_bytes(content)
            with (folder / WEIGHTS).open("wb") as file:
                shapes = {name: jax.eval_shape(pack_int4, array) for name, array in self.weights.items()}
                file.write(
                    header({name: (KINDS[x.dtype], x.shape, x.size * x.dtype.itemsize) for name, x in shapes.items()})
                )
                for name in progress(list(shapes)):
                    array = np.ascontiguousarray(pack_int4(np.asarray(self.weights[name])))
                    file.write(array.reshape(-1).view(np.uint8).data)
            if self.tokenizer is not None:
                self.tokenizer.save(folder)
            (folder / ABOUT).write_text(json.dumps(self.about, indent=2) + "\n")
            shutil.copyfile(Path(__file__).with_name("run_exported.py"), folder / RUNNER)


@dataclass(frozen=True)
class _Programs:
    """The two functions, for a model and static sizes.

    Attributes:
      names, tree: the paths of the parameters' arrays, and their tree.
      chunk: T, the tokens of each row that a prefill reads.
    """

    config: LlamaConfig
    names: tuple[str, ...]
    tree: Any
    batch: int
    context: int
    chunk: int
    cache: CacheOptions

    def prefill(self, weights: Arrays, state: Arrays, tokens: jax.Array, lengths: jax.Array, sampling: Arrays) -> Any:
        params, before = self._open(weights, state)
        new = jnp.clip(lengths - state["length"], 0, self.chunk)
        after = prefill(self.config, params, before, tokens, Positions(new, rope_lengths=lengths))
        state = state | {"seen": mark_seen(state["seen"], tokens, new)}
        return self._choose(params, state, after, sampling, new > 0)

    def decode(self, weights: Arrays, state: Arrays, sampling: Arrays) -> Any:
        params, before = self._open(weights, state)
        tokens, ones = state["token"][:, None], jnp.ones(self.batch, jnp.int32)
        hidden, cache = forward(self.config, params, tokens, before.cache, positions=Positions(ones))
        state = state | {"seen": mark_seen(state["seen"], tokens, ones), "count": state["count"] + 1}
        return self._choose(params, state, PrefillState(cache, hidden[:, 0]), sampling, jnp.bool_(True))

    def state(self, params: Llama) -> Arrays:
        """The state before any token: for each row the number of tokens in the cache, the number generated before `token`,
        and the ids that it contains (for the repetition penalty)."""
        cache = self._empty(params).cache
        per_row = {name: jnp.zeros(self.batch, jnp.int32) for name in ("token", "count")}
        seen = jnp.zeros((self.batch, self.config.vocab_size), bool)
        return per_row | {"length": cache.length, "seen": seen} | _flat(cache.pages, "pages")

    def _empty(self, params: Llama) -> PrefillState:
        return init_prefill(self.config, params, self.batch, self.context, self.cache, max_tokens_per_pass=self.chunk)

    def _open(self, weights: Arrays, state: Arrays) -> tuple[Llama, PrefillState]:
        """The parameters and the cache; every row has its own pages, so their table is a constant."""
        params = jax.tree.unflatten(self.tree, [weights[name] for name in self.names])
        empty = self._empty(params)
        names = _flat(empty.cache.pages, "pages")
        pages = jax.tree.unflatten(jax.tree.structure(empty.cache.pages), [state[name] for name in names])
        return params, empty._replace(cache=empty.cache.replace(pages=pages, length=state["length"]))

    def _choose(self, params: Llama, state: Arrays, after: PrefillState, sampling: Arrays, chosen: jax.Array) -> Any:
        logits = compute_logits(self.config, params, after.hidden, Sharding())
        token = sample(logits, Sampling(**sampling), state["seen"], state["count"])
        token = jnp.where(chosen, token, state["token"])
        return state | {"token": token, "length": after.cache.length} | _flat(after.cache.pages, "pages"), logits


def export_model(
    config: LlamaConfig,
    params: Llama,
    tokenizer: Tokenizer | None = None,
    *,
    context: int | None = None,
    batch: int = 1,
    chunk: int = 64,
    cache: CacheOptions = CacheOptions(),
    platforms: Sequence[str] = ("cpu", "cuda", "tpu"),
) -> ExportedModel:
    """Trace and lower the programs of a model; nothing is compiled or computed.

    Args:
      config, params: the model; quantized weights stay as they are, and so does an attached adapter.
      tokenizer: written next to the weights; its stop ids end a row.
      context: capacity of the cache in tokens per row; by default the model's context, but at most 2,048.
      batch: the number of rows.
      chunk: tokens of each row that a call of `prefill` reads.
      cache: its dtype, and a window.
      platforms: those that the programs can be compiled for, of `PLATFORMS`. Several share one module, which then takes the
        platform's index as the first argument; JAX passes it.

    Raises:
      GenerationError: an invalid size or platform; a capacity beyond a length at which the model's RoPE changes; a table of
        named adapters.
      ConfigError: hooks; functions of a model that are known only by name; parameters that do not match the configuration.
      UserError: the package flatbuffers is missing.
    """
    context = check_exportable(config, context, batch, chunk, cache, platforms)
    is_table = lambda leaf: isinstance(leaf, MultiLoraWeight)
    if any(map(is_table, jax.tree.leaves(params, is_leaf=is_table))):
        raise GenerationError("a table of adapters cannot be exported; load the one you need with adapter=")
    check_no_hooks(params)
    params = restack_layers(unpad_params(config, params))
    check_params(config, params)
    weights, chunk = _flat(params), prefill_chunk_size(cache, min(chunk, context))
    programs = _Programs(config, tuple(weights), jax.tree.structure(params), batch, context, chunk, cache)
    sampling = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), vars(Sampling().per_row(batch)))
    shapes = {name: jax.eval_shape(pack_int4, array) for name, array in weights.items()}
    common = {"weights": shapes, "state": jax.eval_shape(programs.state, params), "sampling": sampling}
    tokens, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, chunk), (batch,)))
    arguments = {
        "prefill": {name: (common | {"tokens": tokens, "lengths": lengths})[name] for name in PREFILL_ARGUMENTS},
        "decode": common,
    }
    exported = {name: _lower(getattr(programs, name), arguments[name], platforms) for name in arguments}
    results = {"state": common["state"], "logits": jax.ShapeDtypeStruct((batch, config.vocab_size), jnp.float32)}
    about = {
        "batch": batch,
        "context": context,
        "prefill": chunk,
        "vocabulary": config.vocab_size,
        "stop": [] if tokenizer is None else sorted(tokenizer.stop_ids),
        "prefix": [tokenizer.bos_id] if tokenizer is not None and tokenizer.add_bos else [],
        "sampling": {name: {"default": getattr(Sampling(), name), "dtype": str(x.dtype)} for name, x in sampling.items()},
        "bytes": {name: bytes_in_memory(common[name]) for name in ("weights", "state")},
        "arguments": {name: _described(each) for name, each in arguments.items()},
        "results": _described(results),
        "platforms": [*platforms],
        "versions": {"llama_jax": llama_jax.__version__, "jax": jax.__version__},
    }
    return ExportedModel(exported, weights, about, tokenizer)


def check_exportable(
    config: LlamaConfig,
    context: int | None,
    batch: int = 1,
    chunk: int = 1,
    cache: CacheOptions = CacheOptions(),
    platforms: Sequence[str] = PLATFORMS,
) -> int:
    """The capacity of the cache; raises as `export_model` does, before the parameters are read."""
    try:
        import flatbuffers  # type: ignore[import-untyped]  # noqa: F401  # jax.export writes with it
    except ImportError:
        raise UserError('jax.export needs the package flatbuffers: pip install -e ".[export]"') from None
    context = min(config.default_context, DEFAULT_CONTEXT) if context is None else context
    for name, value in (("context", context), ("batch", batch), ("chunk", chunk)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise GenerationError(f"{name}={value!r} must be a positive integer")
    if not platforms or not {*platforms} <= {*PLATFORMS}:
        raise GenerationError(f"platforms={shown(','.join(platforms))} must be some of {', '.join(PLATFORMS)}")
    if cache.window is None and context > config.max_seq_len:
        raise GenerationError(
            f"context={context} exceeds the model's context of {config.max_seq_len}; export at most that, or set a window"
        )
    check_parts_found(config)
    switch = longrope_switch_length(config)
    if switch is not None and context > switch:
        raise GenerationError(
            f"context={context}: after {switch} tokens the frequencies of the model's longrope change and a row must be"
            f" prefilled again, which an exported program cannot do; export at most {switch}"
        )
    return context


def _lower(function: Callable[..., Any], arguments: dict[str, Any], platforms: Sequence[str]) -> export.Exported:
    """The program of a function that updates its second argument, the state, in place."""
    frames = "jax_traceback_in_locations_limit"  # otherwise a module contains local file paths
    limit = getattr(jax.config, frames)
    jax.config.update(frames, 0)
    try:
        with target_platform("accelerator"), native_code(False):
            compiled = jax.jit(function, donate_argnums=1, keep_unused=True)
            return export.export(compiled, platforms=[*platforms])(*arguments.values())
    finally:
        jax.config.update(frames, limit)


def _flat(tree: Any, prefix: str = "") -> Arrays:
    """The arrays of a tree by path, such as "blocks.attention.qkv.planes.0", in the order of its leaves."""
    return {
        ".".join(filter(None, (prefix, jax.tree_util.keystr(path, simple=True, separator=".")))): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _described(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Name, shape and dtype of each array, in the order in which a program takes or returns them."""
    arrays = [pair for name, tree in arguments.items() for pair in _flat(tree, name).items()]
    return [{"name": name, "shape": x.shape, "dtype": str(x.dtype)} for name, x in arrays]
