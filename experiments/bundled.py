"""The bundled model: a vocabulary and a small Llama, trained on 2.4 MB of TinyStories and included in the package.

    python experiments/bundled.py train      trains the final recipe; writes llama_jax/assets/
    python experiments/bundled.py stories    the validation stories as JSONL, for `llama-jax eval`

The aim is the lowest bits per byte over all bytes of the validation file. Each story is evaluated separately, every token is
predicted once, and the token that ends a story counts. The recipe was chosen on the validation stories that are reported,
and the best evaluated step is kept. Commit 2b1345d3 has the comparison from which it was chosen (bundled_sweep.json), and
those with other models and with compressors (bundled_scale.json).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from measuring import DATA, ROOT, read_text

from llama_jax.config import LlamaConfig
from llama_jax.model.trees import parameter_count
from llama_jax.runs.recipe import Recipe
from llama_jax.training.optimizer import OptimizerSettings

TEXT_FOLDER = DATA / "text"
TRAINING, VALIDATION = "training.jsonl", "validation.jsonl"
CARD = "README.md"
MAX_ASSET_BYTES = 6_000_000
PARAGRAPH = "\n\n"
PROMPT = "Once upon a time"
FIRST = 40  # validation stories of the second figure in the card, for a quick check

# The validation file has empty lines both between paragraphs and between stories. In the training file, which marks stories,
# 95 % of the paragraphs that match this begin a story, and 72 % of the first paragraphs match.
OPENING = re.compile(
    r"Once (upon|there)|Once, (there|upon|in)|[A-Z]\w+ and [A-Z]\w+ (are|were|like|liked|love|loved|live|lived) "
)


def recipe() -> Recipe:
    """The recipe of the bundled model."""
    return Recipe(
        model=LlamaConfig(
            vocab_size=4096,
            dim=192,
            n_layers=4,
            n_heads=2,
            n_kv_heads=1,
            hidden_dim=512,
            max_seq_len=512,
            norm_eps=1e-5,
            rope_theta=10_000.0,
            tie_embeddings=True,
        ),
        steps=1900,
        batch=4,
        length=512,
        optimizer=OptimizerSettings(name="muon", learning_rate=8e-3, warmup_steps=40, final_share=0.02, weight_decay=0.6),
        ema_decay=0.99,
        z_loss=1e-4,
        evaluate_every=475,
        save_every=475,
        log_every=50,
        prompts=(PROMPT,),
        sample_tokens=160,
    )


def training_stories(data: Path) -> list[str]:
    """The stories of both training files, with an empty line between paragraphs.

    One file has a line break between stories and an empty line between paragraphs, the other a marker between stories and a
    line break between paragraphs.
    """
    first = re.split(r"(?<!\n)\n(?!\n)", read_text(data / "tinystories-train.txt"))
    second = read_text(data / "tinystories-v2-train.txt").split("<|endoftext|>")
    stories = [*first, *(re.sub(r"\s*\n\s*", PARAGRAPH, story.strip()) for story in second)]
    return [story.strip() for story in stories if story.strip()]


def validation_stories(data: Path) -> list[str]:
    """The stories of the validation file, divided at paragraphs that match `OPENING`."""
    stories: list[list[str]] = []
    for paragraph in read_text(data / "tinystories-valid.txt").split(PARAGRAPH):
        if not stories or OPENING.match(paragraph.lstrip()):
            stories.append([])
        stories[-1].append(paragraph)
    return [PARAGRAPH.join(story).strip() for story in stories]


def shared_stories(training: list[str], validation: list[str]) -> list[str]:
    """Validation stories that occur in the training text, ignoring white space."""
    text = " ".join(" ".join(training).split())
    return [story for story in validation if " ".join(story.split()) in text]


def train_vocabulary(stories: list[str], size: int, path: Path) -> None:
    """Train a byte-pair encoding like Llama 2's, in which the end of a paragraph is one token."""
    import sentencepiece

    model = BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(stories),
        model_writer=model,
        vocab_size=size,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.9999,
        split_digits=True,
        user_defined_symbols=[PARAGRAPH],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        max_sentence_length=1 << 16,
        num_threads=1,
        minloglevel=2,
    )
    path.write_bytes(model.getvalue())


@dataclass(frozen=True)
class Files:
    """Inputs of a run: stories as JSONL and a vocabulary."""

    training: Path
    validation: Path
    vocabulary: Path


def write_files(data: Path, folder: Path, vocab_size: int) -> Files:
    """Write stories and vocabulary to a folder, in formats that `llama_jax.data` and a run read.

    Raises:
      SystemExit: a validation story occurs in the training text.
    """
    training, validation = training_stories(data), validation_stories(data)
    if shared := shared_stories(training, validation):
        raise SystemExit(f"{len(shared)} validation stories occur in the training text, the first: {shared[0][:80]!r}")
    vocabulary = folder / f"vocabulary{vocab_size}.model"
    files = Files(write_stories(folder / TRAINING, training), write_stories(folder / VALIDATION, validation), vocabulary)
    if not vocabulary.exists():
        train_vocabulary(training, vocab_size, vocabulary)
    return files


def write_stories(path: Path, stories: list[str]) -> Path:
    """Write JSONL and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": story}) + "\n" for story in stories), "utf-8")
    return path


def run(recipe: Recipe, files: Files, workdir: Path) -> Any:
    """Train or resume, and return the `Result`."""
    from llama_jax.runs.log import Log
    from llama_jax.runs.loop import train

    return train(
        recipe,
        workdir,
        [files.training],
        validation_data=[files.validation],
        tokenizer=files.vocabulary,
        resume=True,
        log=Log(),
    )


def best_step(workdir: Path) -> Path:
    """The checkpoint of a run with the lowest validation loss."""
    from llama_jax.formats.step_dirs import CHECKPOINTS, by_loss

    return workdir / CHECKPOINTS / str(by_loss(workdir / CHECKPOINTS)[0])


def measured(model: Path, data: Path, folder: Path, stories: int | None = None) -> Any:
    """The `Evaluation` of a model of any format on the first validation stories, or all, with its context and dtype."""
    import llama_jax
    from llama_jax.data import open_corpus
    from llama_jax.evaluation.perplexity import evaluate

    config, params, tokenizer = llama_jax.load(model)
    corpus = open_corpus([write_stories(folder / VALIDATION, validation_stories(data))], tokenizer)
    return evaluate(config, params, corpus.select(np.arange(corpus.document_count)[:stories]))


def write_assets(model: Path, data: Path, folder: Path, assets: Path) -> None:
    """Write a checkpoint as bfloat16 safetensors, its vocabulary, and a card with figures measured on these files.

    Raises:
      SystemExit: the files are larger than 6 MB.
    """
    import llama_jax

    config, params, tokenizer = llama_jax.load(model)
    (assets / CARD).unlink(missing_ok=True)  # `save` replaces a folder only if it holds nothing but a model
    llama_jax.save(assets, config, params, tokenizer, dtype="bfloat16", overwrite=True)
    whole, some = (measured(assets, data, folder, stories) for stories in (None, FIRST))
    (assets / CARD).write_text(card(int(model.name), whole, some, continued(assets, PROMPT)), "utf-8")
    size = sum(path.stat().st_size for path in assets.iterdir())
    if size > MAX_ASSET_BYTES:
        raise SystemExit(f"the assets have {size:,} bytes, more than {MAX_ASSET_BYTES:,}: choose a smaller model")
    print(f"{assets}: {size:,} bytes, {whole.bits_per_byte:.4f} bits per byte")


def continued(model: Path, prompt: str) -> str:
    """A prompt and its continuation, with the defaults of `llama-jax generate` and seed 0."""
    import llama_jax

    config, params, tokenizer = llama_jax.load(model)
    ids = tokenizer.encode(prompt)
    sampling = llama_jax.Sampling(temperature=0.8, top_p=0.95, seed=0)
    new, ends = config.max_seq_len - len(ids), tokenizer.stop_ids
    (story,) = llama_jax.generate(config, params, [ids], max_new_tokens=new, sampling=sampling, stop_tokens=ends)
    return tokenizer.decode(ids + [token for token in story.tokens if token not in ends])


def card(step: int, whole: Any, some: Any, sample: str) -> str:
    """The model card, for the weights after this step."""
    final = recipe()
    model, optimizer = final.model, final.optimizer
    quoted = "\n".join(f"> {line}".rstrip() for line in sample.splitlines())
    return f"""\
# The bundled stories model

A Llama of {parameter_count(model) / 1e6:.2f} million parameters that tells short stories for small children. It comes with
llama_jax so that its commands have something to run; it knows nothing else, follows no instructions, and what it tells may
contradict itself.

## Data and license
Slices of TinyStories (Ronen Eldan and Yuanzhi Li, 2023, https://huggingface.co/datasets/roneneldan/TinyStories), written by
GPT-3.5 and GPT-4, under CDLA-Sharing-1.0: 2.4 MB of the training sets of both versions to train on, 0.8 MB of the validation
set to validate on. No validation story occurs in the training text. That license has conditions for whoever passes the data
on, which this package does not do, and none for what is computed from them ("Results" in its words), as the weights and the
vocabulary are.

## Recipe
`python experiments/bundled.py train`, seed {final.seed}.

| | |
|---|---|
| layers, features | {model.n_layers}, {model.dim} |
| query heads, key/value heads, features of each | {model.n_heads}, {model.n_kv_heads}, {model.head_dim} |
| feed-forward | {model.hidden_dim} |
| context | {model.max_seq_len} tokens |
| vocabulary | {model.vocab_size}, BPE with bytes, learnt from the training text; tied embeddings |
| training | {final.steps:,} steps of {final.batch} x {final.length} tokens, float32 |
| optimizer | {optimizer.name}, learning rate {optimizer.learning_rate:g}, {optimizer.schedule} |
| warm-up | {optimizer.warmup_steps} steps |
| weight decay, z-loss | {optimizer.weight_decay:g}, {final.z_loss:g} |
| these weights | moving average, decay {final.ema_decay:g}, after step {step:,}, the best of those evaluated; bfloat16 |

## Validation
The recipe and the step were chosen on these same stories. Each token is predicted once from a sliding window over its own
story, the token that ends it included.

| stories | bytes | loss, nats per token | bits per byte |
|---|---|---|---|
| all {whole.documents} | {whole.bytes:,} | {whole.loss:.4f} | {whole.bits_per_byte:.4f} |
| the first {some.documents} | {some.bytes:,} | {some.loss:.4f} | {some.bits_per_byte:.4f} |

The file has empty lines between paragraphs and between stories alike; the experiment divides it where a paragraph begins as
a story does. `python experiments/bundled.py stories stories.jsonl` writes what it finds, and then
`llama-jax eval llama_jax/assets --data stories.jsonl` gives the first row, with `--max-documents {FIRST}` the second. On the
file as it lies, in which nothing separates the stories, the command gives 1.1075 bits per byte.

## A sample
`llama-jax generate "{PROMPT}" --seed 0`, on one CPU; another processor may round otherwise and go on otherwise:

{quoted}
"""


@dataclass(frozen=True)
class Train:
    """Train the final recipe and write the assets: a quarter of an hour on two cores."""

    data: Path = TEXT_FOLDER
    """Folder of the TinyStories files."""
    workdir: Path = ROOT / "build" / "bundled"
    """Folder of the run, which resumes from here after an interruption."""
    assets: Path = ROOT / "llama_jax" / "assets"
    """Output folder for weights in bfloat16, config.json, tokenizer.model and the model card."""

    def run(self) -> None:
        final = recipe()
        done = run(final, write_files(self.data, self.workdir, final.model.vocab_size), self.workdir / "run")
        if done.stopped is None:
            write_assets(best_step(self.workdir / "run"), self.data, self.workdir, self.assets)


@dataclass(frozen=True)
class Stories:
    """Write the validation stories one per line, for `llama-jax eval`; the original file has no separators."""

    path: tyro.conf.Positional[Path] = ROOT / "build" / "bundled" / VALIDATION
    """Output file, .jsonl."""
    data: Path = TEXT_FOLDER
    """Folder of the TinyStories files."""

    def run(self) -> None:
        stories = validation_stories(self.data)
        print(f"{write_stories(self.path, stories)}: {len(stories):,} stories")


if __name__ == "__main__":
    tyro.cli(Train | Stories).run()
