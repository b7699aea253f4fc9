"""``llama-jax train``: train a recipe, or resume it; the settings of a recipe."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from llama_jax.cli.options import CompileOptions, ModelPath, PartsOption, ProcessOptions
from llama_jax.cli.terminal import filled
from llama_jax.errors import UserError, short_repr
from llama_jax.settings import help_of
from llama_jax.storage.atomic_write import discard_output

if TYPE_CHECKING:
    from llama_jax.data.data_files import Data
    from llama_jax.runs.recipe import Recipe

NAMED_SOURCE = re.compile(r"([\w.-]+)=(.+)")
WEIGHTED_SOURCE = re.compile(NAMED_SOURCE.pattern + ":([^:/]+)")
STEP_RANGE = re.compile(r"([0-9]{1,18}):([0-9]{1,18})")
WEIGHTS_SETTINGS = re.compile(
    r"(vocabulary|model)\b(?!\.(rope_scaling|rope_theta|max_seq_len)\b)"
)  # by what comes with weights


@dataclass(frozen=True, kw_only=True)
class Train(PartsOption, CompileOptions, ProcessOptions):
    """Train a model. generate, eval and the other commands can load it from the run's folder at any time.

    SIGTERM and Ctrl-C save and stop; the same command with --resume continues as if nothing had happened. Several processes
    run the same command, with --distributed or a different --process-id each; the first one prints for all."""

    recipe: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RECIPE")]]
    """tiny, shakespeare, stories15m and tinyllama train from scratch. sft, dpo and grpo fine-tune --weights on chats, on
    preferences (see `data show`), or on its own answers, scored by --reward. distill learns the predictions of --teacher.
    FILE.py:FUNCTION is your own function that returns a Recipe."""
    changes: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[KEY=VALUE ...]")]] = ()
    """Settings of the recipe to change, anywhere on the line: steps=500 optimizer.learning_rate=1e-3 model=stories-15m
    model.n_layers=4. llama-jax train RECIPE --help lists all settings and their values; in Python see llama_jax.Recipe."""
    workdir: ModelPath
    """Folder for recipe.json, metrics.jsonl and checkpoints/STEP, shared by all processes; or s3://BUCKET/PATH or
    gs://BUCKET/PATH."""
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH|NAME=PATH:WEIGHT ..."), tyro.conf.UseAppendAction]
    """Text, JSONL, JSON (all also as .gz and .zst), Parquet, Arrow, .bin, .array_record or .corpus files, or folders of
    them, such as those of `data build`. Takes several, and can be repeated. For a mixture with exact shares of the rows:
    --data stories=PATH:0.7 --data books=PATH:0.3."""
    validation_data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH|NAME=PATH ..."), tyro.conf.UseAppendAction] = ()
    """Validation data, as --data. By default a share of the documents of each source is held out."""
    tokenizer: ModelPath | None = None
    """A SentencePiece .model, a Llama 3 tokenizer.model, a tokenizer.json, a GGUF or a model's folder."""
    weights: ModelPath | None = None
    """The model to fine-tune, in any format. Its shape and tokenizer replace the recipe's. To extend its context, set
    model.max_seq_len and model.rope_scaling.kind, .factor and the other settings of that kind."""
    teacher: ModelPath | None = None
    """The model whose predictions are learned, in any format and with the same vocabulary; for distill or any other recipe
    for text or chats. The same as distill.teacher=PATH."""
    reward: Annotated[tuple[str, ...], tyro.conf.arg(metavar="FILE.py:FUNCTION"), tyro.conf.UseAppendAction] = ()
    """For grpo: a function of the completions and the fields of their prompts, as lists, that returns a number per
    completion. Several rewards are added. The same as rewards.functions=["FILE.py:FUNCTION"]."""
    resume: bool = False
    """Resume from the newest checkpoint in the folder, if there is one."""
    reweigh: bool = False
    """With --resume: allow different weights of the same sources from now on. Checkpoints record them."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=N,...")] = ""
    """Mesh of the devices of all processes, for example data=2,fsdp=4,tensor=1; context=2 shards the tokens of each row. The
    default is data over all devices."""
    backend: Literal["jit", "pmap"] = "jit"
    """How to distribute the step: jit over the mesh, or pmap with a copy of the model on every device."""
    trace: Annotated[str, tyro.conf.arg(metavar="FIRST:LAST")] = ""
    """Steps to profile, written to trace/ in the folder: 20:25 profiles the five steps from step 20."""
    track: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], tyro.conf.UseAppendAction] = ()
    """Also log metrics to TensorBoard (tensorboard/ in the folder), Weights & Biases (offline with WANDB_MODE=offline) or
    MLflow (at MLFLOW_TRACKING_URI). Each is an extra: pip install -e ".[wandb]"."""
    save_timeout: float = 1800.0
    """Maximum number of seconds to start and to write a checkpoint in the background; exceeding it ends the run with an
    error."""

    def run(self) -> None:
        import jax

        from llama_jax.cli.jax_setup import start_backend, use_compilation_cache

        # orbax logs the traceback of a failed save, which then ends this command with a line of its own.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        replaced = [change for change in self.changes if WEIGHTS_SETTINGS.match(change)]
        if self.weights is not None and replaced:
            raise UserError(
                f"{replaced[0]} and --weights exclude each other: the weights determine shape and tokenizer; only"
                " model.rope_scaling, model.rope_theta and model.max_seq_len can be changed"
            )
        use_compilation_cache(self.no_cache)
        from llama_jax.parallel.mesh import MeshSizes, parse_mesh

        with self.join_processes() as joined:
            if joined.index > 0:  # only process 0 writes to stdout, to which XLA's collectives for CPU write too
                discard_output(1)
            recipe = self._recipe()
            if recipe.exact_shards:  # before JAX starts, unless the user has set a number
                from llama_jax.training.exact_gradients import exact_threads

                os.environ.setdefault("PJRT_NPROC", str(exact_threads(recipe.exact_shards)))
            start_backend(training=True)
            from llama_jax.runs.log import Log
            from llama_jax.runs.loop import train

            result = train(
                recipe,
                self.workdir,
                _parse_sources(self.data, weighted=True),
                validation_data=_parse_sources(self.validation_data, weighted=False),
                tokenizer=self.tokenizer,
                weights=self.weights,
                resume=self.resume,
                reweigh=self.reweigh,
                mesh=parse_mesh(self.mesh) if self.mesh else MeshSizes(data=jax.device_count()),
                backend=self.backend,
                trace=_parse_trace(self.trace),
                track=self.track,
                save_timeout=self.save_timeout,
                processes=joined,
                log=Log(quiet=joined.index > 0),
            )
        if result.stopped == "SIGINT":
            sys.exit(130)  # so that a script which runs this goes no further either

    def _recipe(self) -> Recipe:
        """The recipe with its changes, and with the model of the weights if there are any."""
        from llama_jax.formats.loading import open_checkpoint
        from llama_jax.runs.overrides import override
        from llama_jax.runs.recipes import check_weights, find

        check_weights(self.recipe, has_weights=self.weights is not None)
        recipe = find(self.recipe)
        changes = [*self.changes, *([] if self.teacher is None else [f"distill.teacher={self.teacher}"])]
        if self.reward:
            changes.append(f"rewards.functions={json.dumps(self.reward)}")
        if self.weights is None:
            recipe = override(recipe, changes)
        else:
            # The length is set together with the changes: either alone may not fit the other.
            started = replace(recipe, model=open_checkpoint(self.weights).config, length=1)
            recipe = override(started, [f"length={recipe.length}", *changes])
        (model,) = self.with_parts(recipe.model)
        return replace(recipe, parts=model.parts)


def _parse_sources(texts: Sequence[str], *, weighted: bool) -> Data:
    """Paths, or the sources of a mixture: NAME=PATH:WEIGHT, or NAME=PATH if they have no weights."""
    from llama_jax.data.data_files import WeightedData

    sources: list[Any] = []
    for text in texts:
        match = None
        if not Path(text).exists():
            match = (WEIGHTED_SOURCE if weighted else NAMED_SOURCE).fullmatch(text)
            if match is None and NAMED_SOURCE.fullmatch(text):
                raise UserError(f"--data {text} has no weight; write NAME=PATH:WEIGHT, for example --data {text}:0.5")
        sources.append(text if match is None else WeightedData(*match.groups()))
    return sources


def _parse_trace(text: str) -> range | None:
    if not text:
        return None
    match = STEP_RANGE.fullmatch(text)
    if not match or int(match[1]) >= int(match[2]):
        raise UserError(f"--trace {short_repr(text)} must be two steps, the first below the second, for example 20:25")
    return range(int(match[1]), int(match[2]))


FUNCTIONS = ("parts", "loss")  # settings of recipes in files, which no command line can set


def settings_page(name: str, changes: Sequence[str] = ()) -> str:
    """The settings of a recipe, each as its change is written; UserError where there is no such recipe or change."""
    from llama_jax.runs.overrides import override
    from llama_jax.runs.recipes import BUILT_IN, find

    recipe = override(find(name), changes)
    description = (BUILT_IN[name].__doc__ or "") if name in BUILT_IN else ""
    return "\n".join(
        [
            f"usage: llama-jax train {name} [KEY=VALUE ...] --data PATH --workdir PATH [OPTIONS]",
            "",
            *([filled(description), ""] if description else []),
            "KEY=VALUE changes these settings. llama-jax train --help lists the options.",
            "",
            *_setting_lines(recipe, ""),
        ]
    )


def _setting_lines(settings: Any, within: str) -> list[str]:
    """A line for each setting with its meaning below; then the settings that are dataclasses, with their fields."""
    from llama_jax.runs.overrides import dataclass_of

    settings_type: type = type(settings)
    help_texts, types_, lines, parts = help_of(settings_type), get_type_hints(settings_type), [], []
    for field in (nested for nested in fields(settings) if nested.name not in FUNCTIONS):
        value, key, part = getattr(settings, field.name), within + field.name, dataclass_of(types_[field.name])
        meaning = help_texts.get(field.name, "").replace("`", "")
        if is_dataclass(value):
            parts += ["", filled(f"{key}: {meaning}", indent=2), *_setting_lines(value, f"{key}.")]
            continue
        if part is not None:  # made of the changed settings alone
            meaning = f"{meaning} Settings: {', '.join(f'{key}.{nested.name}' for nested in fields(part))}."
        elif get_origin(types_[field.name]) is Literal:
            meaning = f"{meaning} One of {', '.join(map(str, get_args(types_[field.name])))}."
        lines += [filled(f"{key}={_setting_text(value)}", indent=2), *([filled(meaning, indent=8)] if meaning else [])]
    return lines + parts


def _setting_text(value: Any) -> str:
    """A value as a change is written."""
    if isinstance(value, tuple):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value).replace("\n", "\\n")
