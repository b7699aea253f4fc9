"""TinyStories with the shapes of llama2.c: 15, 42 and 110 million parameters, for a GPU.

    python experiments/stories.py 15m --data STORIES --validation-data HELD --tokenizer tokenizer.model
    python experiments/stories.py smoke --data STORIES            a minute on a CPU: the same stages with a tiny model
    llama-jax train experiments/stories.py:stories42m --workdir DIR --data STORIES --tokenizer tokenizer.model

STORIES is the text of TinyStories (Eldan & Li 2023), with `<|endoftext|>` between stories, as published; tokenizer.model is
Llama 2's vocabulary of 32,000. A step has 131,072 tokens, and the schedule has 100,000 steps, as in llama2.c. llama2.c's
README gives the validation losses of its models in nats per token. With the same vocabulary and validation stories they are
roughly comparable with those printed here: in llama2.c a token also attends to previous stories.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from measuring import devices, versions, write_report
from plotting import draw_runs, read_metrics

from llama_jax.config.presets import preset
from llama_jax.model.trees import parameter_count
from llama_jax.runs import recipes
from llama_jax.runs.overrides import override
from llama_jax.runs.recipe import Recipe
from llama_jax.training.optimizer import OptimizerSettings

ROOT = Path(__file__).parents[1]
LLAMA2C = {"15m": 1.072, "42m": 0.847, "110m": 0.760}


def stories15m() -> Recipe:
    """The built-in recipe."""
    return recipes.stories15m()


def stories42m() -> Recipe:
    """8 layers with 512 features, rows of 1,024 tokens."""
    return replace(stories15m(), model=preset("stories-42m"), batch=128, length=1024)


def stories110m() -> Recipe:
    """12 layers with 768 features, rows of 1,024 tokens."""
    return replace(stories15m(), model=preset("stories-110m"), batch=128, length=1024)


def smoke() -> Recipe:
    """The shape of stories260K and a vocabulary trained on the data: a few steps to check that everything works."""
    return replace(
        stories15m(),
        model=preset("stories-260k"),
        steps=40,
        batch=16,
        length=64,
        accumulate=2,
        optimizer=OptimizerSettings(learning_rate=3e-3, warmup_steps=5, final_share=0.0),
        dtype="float32",  # bfloat16 is slow on most CPUs
        vocabulary="bpe",
        evaluate_every=20,
        evaluate_tokens=20_000,
        save_every=20,
        sample_tokens=32,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "15m": stories15m,
    "42m": stories42m,
    "110m": stories110m,
    "smoke": smoke,
}


@dataclass(frozen=True)
class Arguments:
    """What to train."""

    size: tyro.conf.Positional[Literal["15m", "42m", "110m", "smoke"]]
    """Size of the model."""
    changes: tyro.conf.Positional[tuple[str, ...]] = ()
    """Changes to the recipe, for example steps=20000 remat=full accumulate=8."""
    data: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """Stories, in any format of `llama-jax train --data`; may be repeated."""
    validation_data: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """Stories to validate on; may be repeated. By default a share of the stories of --data."""
    tokenizer: Path | None = None
    """Llama 2's vocabulary; smoke trains its own."""
    workdir: Path | None = None
    """Folder of the run, which resumes there; by default build/stories/SIZE."""
    output: Path | None = None
    """JSON file of the figures; by default experiments/results/stories_SIZE.json."""


def main(arguments: Arguments) -> None:
    import jax

    from llama_jax.parallel.mesh import MeshSizes
    from llama_jax.runs.log import Log
    from llama_jax.runs.loop import train

    if not arguments.data:
        raise SystemExit("--data is missing; pass the text of TinyStories or any other text")
    chosen = override(RECIPES[arguments.size](), arguments.changes)
    workdir = arguments.workdir or ROOT / "build" / "stories" / arguments.size
    output = arguments.output or ROOT / "experiments" / "results" / f"stories_{arguments.size}.json"
    found = train(
        chosen,
        workdir,
        arguments.data,
        validation_data=arguments.validation_data,
        tokenizer=arguments.tokenizer,
        resume=True,
        mesh=MeshSizes(data=jax.device_count()),
        log=Log(),
    )
    if found.stopped is not None:
        return
    losses = read_metrics(workdir, "validation")["loss"]
    row = {
        "parameters": parameter_count(chosen.model),
        "tokens": chosen.steps * chosen.batch * chosen.length,
        "loss": losses[-1],
        "lowest_loss": float(np.nanmin(losses)),
        "tokens_per_second": float(np.nanmedian(read_metrics(workdir, "train")["tokens_per_second"])),
    }
    print(f"{'size':8}{'parameters':>13}{'tokens':>16}{'loss':>9}{'lowest':>9}{'llama2.c':>10}{'tokens/s':>12}")
    print(
        f"{arguments.size:8}{row['parameters']:>13,}{row['tokens']:>16,}{row['loss']:>9.4f}{row['lowest_loss']:>9.4f}"
        f"{LLAMA2C.get(arguments.size, ''):>10}{row['tokens_per_second']:>12,.0f}"
    )
    about = {
        "device": devices(),
        "versions": versions("jax"),
        "size": arguments.size,
        "changes": list(arguments.changes),
        "llama2c_loss": LLAMA2C.get(arguments.size),
        **row,
    }
    write_report(output, about)
    draw_runs({arguments.size: workdir}).savefig(output.with_suffix(".png"), dpi=80)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
