"""``llama-jax quickstart``, ``compile`` and ``completion``: check the installation, and prepare it."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import tyro

import llama_jax
from llama_jax.cli.argv import MARKERS, OPTION_RULES
from llama_jax.cli.options import ExactOption, LoadOptions, ModelPath
from llama_jax.errors import GenerationError
from llama_jax.settings import at_least

# tyro's scripts complete file names only after options of type Path. Ours may be URLs, so they are texts: let the scripts
# complete file names wherever they know no word.
COMPLETION_FIXES = (
    ('[[ "$completions" == ', '[[ -z "$completions" || "$completions" == '),  # bash and zsh
    (  # fish: the script prints all options, and fish filters them
        'if test "$results" = ',
        'if begin; not string match -q -- "-*" (commandline -ct); and not string match -qv -- "-*" $results; end'
        '; or test "$results" = ',
    ),
    (  # with a slash after a folder, and names with spaces as one; "$cur" has the words before as well
        'COMPREPLY=($(compgen -f -- "$cur"))',
        "local IFS=$'\\n'; compopt -o filenames; COMPREPLY=($(compgen -f -- \"${COMP_WORDS[COMP_CWORD]}\"))",
    ),
)


@dataclass(frozen=True)
class Quickstart:
    """Run a small random model once and print the shape of its logits: (2, 16, 1000)."""

    def run(self) -> None:
        import jax

        config = llama_jax.LlamaConfig(
            vocab_size=1000,
            dim=64,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            hidden_dim=192,
            max_seq_len=128,
            norm_eps=1e-5,
            rope_theta=10_000.0,
            tie_embeddings=False,
        )
        params = llama_jax.init(config, jax.random.key(0))
        tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, config.vocab_size)
        print(llama_jax.logits(config, params, tokens).shape)


@dataclass(frozen=True, kw_only=True)
class Compile(ExactOption, LoadOptions):
    """Compile a model's programs in advance, so that the first start of generate, chat or serve does not compile.

    They are kept in JAX's compilation cache, where these commands look for them, and are valid for the same model, options,
    library, JAX and processor. Existing ones are not compiled again.
    """

    SHOWN_FIRST = ("model", "purpose", "max_tokens")

    model: tyro.conf.Positional[Annotated[ModelPath | None, tyro.conf.arg(metavar="[MODEL]")]] = None
    """Folder or file of a model, as in generate. The default is the small stories model of the package."""
    purpose: Annotated[Literal["generate", "serve"], tyro.conf.arg(name="for")] = "generate"
    """Command to compile for, with its default options. chat uses the programs of generate."""
    max_tokens: Annotated[int, at_least(1)] = 1024
    """With --for generate: maximum number of tokens of a prompt and its continuation."""

    def run(self) -> None:
        import jax

        from llama_jax.cli.jax_setup import reason_unwritable

        if self.no_cache:
            raise GenerationError("compile needs the cache of programs; omit --no-cache")
        self.start_jax()
        cache: str = jax.config.jax_compilation_cache_dir or ""  # type: ignore[attr-defined]  # made when JAX is imported
        if not jax.config.jax_enable_compilation_cache or not cache or "://" in cache:  # type: ignore[attr-defined]
            raise GenerationError(
                "compile needs JAX's compilation cache in a folder of this machine; set JAX_COMPILATION_CACHE_DIR to one,"
                " and omit JAX_ENABLE_COMPILATION_CACHE=false"
            )
        problem = reason_unwritable(cache)
        if problem is not None:
            raise GenerationError(f"{cache} cannot be written ({problem}); set JAX_COMPILATION_CACHE_DIR to another folder")
        folder = Path(cache)
        started, before = time.perf_counter(), _sizes(folder)
        if self.purpose == "serve":  # its engine compiles all that requests can need
            from llama_jax.cli.serve import Serve
            from llama_jax.parallel.multihost import Processes

            options = {field.name: getattr(self, field.name) for field in fields(LoadOptions)}
            Serve(exact=self.exact, **options).start(Processes()).engine.close()
        else:
            for step in self._generate():
                made = _sizes(folder).keys() - before.keys()
                print(f"{step}: {len(made)} programs so far, {time.perf_counter() - started:.1f} s", file=sys.stderr)
        after = _sizes(folder)
        made = after.keys() - before.keys()
        size = sum(after[name] for name in made) / 1e6
        print(f"{len(made)} programs made, {size:.1f} MB, in {folder} ({len(after)}, {sum(after.values()) / 1e6:.1f} MB)")

    def _generate(self) -> Iterator[str]:
        """Generate a few tokens after prompts of every size; says each time which."""
        from llama_jax.inference.decode import STEPS_PER_CHUNK

        config, params, tokenizer = self.load_with_tokenizer()
        longest, size = min(self.max_tokens, config.max_seq_len), 16
        while True:
            room = min(size, longest) - 1
            prompt = max(1, min(size - 2 * STEPS_PER_CHUNK, room))  # it ends, and its continuation begins, below the size
            for temperature in (0.0, 1.0):  # greedy decoding has programs of its own
                chunks = llama_jax.stream(
                    config,
                    params,
                    [[0] * prompt],
                    max_new_tokens=min(4 * STEPS_PER_CHUNK, config.max_seq_len - prompt),
                    sampling=llama_jax.Sampling(temperature=temperature),
                    stop_tokens=tokenizer.stop_ids,
                    compute=self.compute(),
                )
                for _ in chunks:
                    pass
            yield f"prompts of up to {min(size, longest)} tokens"
            if size >= longest:
                return
            size *= 2


def _sizes(folder: Path) -> dict[str, int]:
    """The bytes of each compiled program in JAX's cache."""
    return {path.name: path.stat().st_size for path in folder.glob("*-cache")}


@dataclass(frozen=True)
class Completion:
    """Print a script that lets your shell complete the commands of llama-jax, their options and their values.

    bash: llama-jax completion bash > ~/.local/share/bash-completion/completions/llama-jax

    zsh: llama-jax completion zsh > _llama-jax, in a folder of $fpath

    fish: llama-jax completion fish > ~/.config/fish/completions/llama-jax.fish
    """

    shell: tyro.conf.Positional[Annotated[Literal["bash", "zsh", "fish"], tyro.conf.arg(metavar="bash|zsh|fish")]]
    """The shell that the script is for."""

    def run(self) -> None:
        from llama_jax.cli import COMMANDS, command_type

        commands: list[Any] = []
        for group in COMMANDS.values():
            for name, (_, summary) in group.items():
                subcommand = tyro.conf.subcommand(name, description=summary, prefix_name=False)
                commands.append(Annotated[command_type(name), subcommand])
        all_of_them: Any = Union[tuple(commands)]  # noqa: UP007
        output, args = io.StringIO(), ["--tyro-print-completion", self.shell]
        with redirect_stdout(output), suppress(SystemExit):
            tyro.cli(all_of_them, prog="llama-jax", args=args, config=MARKERS, registry=OPTION_RULES)
        script = output.getvalue()
        for plain, replacement in COMPLETION_FIXES:
            script = script.replace(plain, replacement)
        # An optional choice is not written as None.
        print(re.sub(r"'choices': \[[^]]*\]", lambda match: re.sub(r"'None', |, 'None'", "", match[0]), script), end="")
