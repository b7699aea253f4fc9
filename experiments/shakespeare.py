"""Train on the bytes of Shakespeare's plays for minutes on two cores; compare with nanoGPT's figures on the same text.

    python experiments/shakespeare.py                     both recipes; resumes where it was stopped
    python experiments/shakespeare.py steps=300           shorter, with changes as in `llama-jax train`
    llama-jax train experiments/shakespeare.py:nanogpt_cpu --workdir DIR --data tinyshakespeare.txt

The first nine tenths of the text are for training and the last tenth for validation, as in nanoGPT. The text is ASCII, so a
byte is a character, and the loss in nats per byte is comparable with nanoGPT's. Here it is measured over the whole last
tenth, in adjacent windows of the training length, after the last step; no checkpoint is selected by it.
nanoGPT's two figures are from its README (github.com/karpathy/nanoGPT): 1.88 for 0.8 million parameters after three minutes
on a laptop, and 1.4697, the best of its evaluations, for 10.65 million with dropout after three minutes on an A100.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro
from measuring import DATA, RESULTS, ROOT, describe_run, read_text, write_report
from plotting import draw_runs

from llama_jax.model.trees import parameter_count
from llama_jax.runs import recipes
from llama_jax.runs.overrides import override
from llama_jax.runs.recipe import Recipe
from llama_jax.training.optimizer import OptimizerSettings

NANOGPT = {"nanoGPT on a CPU": 1.88, "nanoGPT on a GPU": 1.4697}


def recipe() -> Recipe:
    """The built-in recipe."""
    return recipes.shakespeare()


def nanogpt_cpu() -> Recipe:
    """A Llama with the width, depth, batch, context, steps and learning rate of nanoGPT's run on a laptop."""
    built_in = recipes.shakespeare()
    return replace(
        built_in,
        model=replace(built_in.model, dim=128, n_layers=4, n_heads=4, n_kv_heads=4, hidden_dim=344, max_seq_len=64),
        steps=2000,
        batch=12,
        length=64,
        optimizer=OptimizerSettings(learning_rate=1e-3, warmup_steps=100, b2=0.99),
        sample_tokens=50,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {made.__name__: made for made in (recipe, nanogpt_cpu)}


@dataclass(frozen=True)
class Arguments:
    """What to run."""

    changes: tyro.conf.Positional[tuple[str, ...]] = ()
    """Changes to both recipes, for example steps=300 optimizer.learning_rate=1e-3."""
    data: Path = DATA / "text" / "tinyshakespeare.txt"
    """The plays; other texts work as well, with other figures."""
    workdir: Path = ROOT / "build" / "shakespeare"
    """Folder of the two runs, which are named after their recipes."""
    output: Path = RESULTS / "shakespeare_cpu.json"
    """JSON file of the figures, with the curves (.png) next to it."""


def divide(data: Path, folder: Path) -> tuple[Path, Path]:
    """Write the first nine tenths and the last tenth of a text to two files; return their paths."""
    text = read_text(data)
    end = int(0.9 * len(text))
    parts = folder / "training.txt", folder / "validation.txt"
    folder.mkdir(parents=True, exist_ok=True)
    for path, part in zip(parts, (text[:end], text[end:]), strict=True):
        path.write_text(part, "utf-8")
    return parts


def run(chosen: Recipe, training: Path, validation: Path, workdir: Path) -> dict[str, Any]:
    """Train or resume; return the figures of the last step and its sample."""
    from llama_jax.data import open_corpus
    from llama_jax.evaluation.perplexity import evaluate
    from llama_jax.runs.log import Log
    from llama_jax.runs.loop import train
    from llama_jax.runs.metrics import METRICS
    from llama_jax.tokenizers.sentencepiece import byte_tokenizer

    params = train(chosen, workdir, training, validation_data=validation, resume=True, log=Log()).state.params
    corpus = open_corpus(validation, byte_tokenizer(), reading=chosen.reading)
    evaluation = evaluate(chosen.model, params, corpus, length=chosen.length, stride=chosen.length)
    # If the run was killed before, a line may be incomplete.
    lines = [json.loads(line) for line in (workdir / METRICS).read_text("utf-8").splitlines() if line.endswith("}")]
    samples = [line["text"] for line in lines if line["kind"] == "sample"]
    return {
        "parameters": parameter_count(chosen.model),
        "steps": chosen.steps,
        "tokens": chosen.steps * chosen.batch * chosen.length,
        "nats_per_byte": evaluation.bits_per_byte * math.log(2),
        "bits_per_byte": evaluation.bits_per_byte,
        "bytes": evaluation.bytes,
        "sample": samples[-1],
    }


def main(arguments: Arguments) -> None:
    training, validation = divide(arguments.data, arguments.workdir)
    results = {
        name: run(override(made(), arguments.changes), training, validation, arguments.workdir / name)
        for name, made in RECIPES.items()
    }
    print(f"\n{results['recipe']['sample']}\n")
    print(f"{'':20}{'parameters':>12}{'tokens':>12}{'nats per byte':>15}")
    for name, row in results.items():
        print(f"{name:20}{row['parameters']:>12,}{row['tokens']:>12,}{row['nats_per_byte']:>15.4f}")
    for name, loss in NANOGPT.items():
        print(f"{name:20}{'':24}{loss:>15.4f}")
    write_report(arguments.output, describe_run(arguments) | {"runs": results, "nanogpt": NANOGPT})
    figure = draw_runs({name: arguments.workdir / name for name in results})
    figure.savefig(arguments.output.with_suffix(".png"), dpi=80)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
