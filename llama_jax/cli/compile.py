"""``llama-jax compile``: make the executables of a model ahead."""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from llama_jax.cli.options import LoadOptions
from llama_jax.cli.paths import ModelPath
from llama_jax.config.validation import require_positive_int
from llama_jax.errors import GenerationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Compile(LoadOptions):
    """Compile a model's programs ahead, so that the first start of generate, chat or serve neither traces nor compiles.

    They are kept where these commands look for them, and serve the same model, options, library, JAX and processor. Those
    that are there already are not made again.
    """

    SHOWN_FIRST = ("model", "purpose", "max_tokens")

    model: tyro.conf.Positional[Annotated[ModelPath | None, tyro.conf.arg(metavar="[MODEL]")]] = None
    """A model's folder or file, as for generate; by default the small stories model that comes with the package."""
    purpose: Annotated[Literal["generate", "serve"], tyro.conf.arg(name="for")] = "generate"
    """The command to compile for, with its default options; chat has the programs of generate."""
    max_tokens: int = 1024
    """With --for generate: most tokens of a prompt and its continuation, at most the model's context."""

    def run(self) -> None:
        from llama_jax import compiled
        from llama_jax.cli.runtime import start_backend, use_compilation_cache
        from llama_jax.compiled import store

        require_positive_int("max_tokens", self.max_tokens)
        if self.no_cache:
            raise GenerationError("no_cache=True keeps nothing of what compile makes; leave it out")
        use_compilation_cache()
        folder = store.folder()
        if folder is None or compiled.refusal(folder):
            reason = compiled.refusal(folder) if folder else f"{compiled.VARIABLE} or JAX's settings turn them off"
            raise GenerationError(f"executables are not kept: {reason}; set {compiled.VARIABLE} to a folder of your own")
        # What cannot be stored is said.
        logging.basicConfig(format="llama-jax: %(message)s")
        logging.getLogger("llama_jax.compiled").setLevel(logging.INFO)
        started, before = time.perf_counter(), _sizes(folder)
        if self.purpose == "serve":
            self._serve()
        else:
            start_backend()
            for step in self._generate():
                made = _sizes(folder).keys() - before.keys()
                print(f"{step}: {len(made)} programs so far, {time.perf_counter() - started:.1f} s", file=sys.stderr)
        after = _sizes(folder)
        made = after.keys() - before.keys()
        size = sum(after[name] for name in made) / 1e6
        print(f"{len(made)} programs made, {size:.1f} MB, in {folder} ({len(after)}, {sum(after.values()) / 1e6:.1f} MB)")

    def _generate(self) -> Iterator[str]:
        """Generate a few tokens after prompts of every size; says each time which."""
        import llama_jax
        from llama_jax.inference.decode import STEPS_PER_CHUNK
        from llama_jax.model.forward_options import Compute

        config, params, tokenizer = self.load_beside()
        longest, size = min(self.max_tokens, config.max_seq_len), 16
        while True:
            room = min(size, longest) - 1
            prompt = max(1, min(size - 2 * STEPS_PER_CHUNK, room))  # it ends, and its continuation begins, below the size
            pieces = llama_jax.stream(
                config,
                params,
                [[0] * prompt],
                max_new_tokens=min(4 * STEPS_PER_CHUNK, config.max_seq_len - prompt),
                stop_tokens=tokenizer.stop_ids,
                compute=Compute(attention=self.attention),
            )
            for _ in pieces:
                pass
            yield f"prompts of up to {min(size, longest)} tokens"
            if size >= longest:
                return
            size *= 2

    def _serve(self) -> None:
        """Start the engine of `serve`, which compiles all that requests can need."""
        from llama_jax.cli.runtime import start_backend
        from llama_jax.cli.serve import Serve
        from llama_jax.parallel.multihost import Processes

        start_backend()
        options = {field.name: getattr(self, field.name) for field in fields(LoadOptions)}
        Serve(**options).start(Processes()).engine.close()


def _sizes(folder: Path) -> dict[str, int]:
    """The bytes of each executable."""
    from llama_jax.compiled.store import SUFFIX

    return {path.name: path.stat().st_size for path in folder.glob(f"*{SUFFIX}")}
