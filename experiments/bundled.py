"""The bundled model: a vocabulary and a small Llama, trained on 2.4 MB of TinyStories and included in the package.

    python experiments/bundled.py train      trains the final recipe; writes llama_jax/assets/
    python experiments/bundled.py sweep      compares the settings from which it was chosen
    python experiments/bundled.py scale      other models and compressors on the same text
    python experiments/bundled.py stories    the validation stories as JSONL, for `llama-jax eval`

The aim is the lowest bits per byte over all bytes of the validation file. Each story is evaluated separately, every token is
predicted once, and the token that ends a story counts. The recipe was chosen on the validation stories that are reported,
and the best evaluated step is kept.
"""

from __future__ import annotations

import json
import lzma
import math
import re
import shutil
from collections import Counter, defaultdict
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from measuring import text_of, write_report

from llama_jax.config import LlamaConfig
from llama_jax.model.trees import parameter_count
from llama_jax.runs.overrides import override
from llama_jax.runs.recipe import Recipe
from llama_jax.training.optimizer import OptimizerSettings

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data" / "text"
RESULTS = ROOT / "experiments" / "results"
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


# Changes of the recipe that were compared. The first ones train for two thirds of an epoch, the "long" ones until the model
# memorizes the text, when weight decay matters.
SHORT = ("steps=200", "optimizer.warmup_steps=10", "evaluate_every=0", "save_every=0")
LONG = ("steps=1900", "optimizer.warmup_steps=40")
SWEEP: dict[str, tuple[str, ...]] = {
    "the recipe": (),
    "vocabulary 2048": ("model.vocab_size=2048",),
    "adamw": ("optimizer.name=adamw",),
    "adamw, learning rate 3e-3": ("optimizer.name=adamw", "optimizer.learning_rate=3e-3"),
    "vocabulary 8192": ("model.vocab_size=8192",),
    "dim 256, 2 layers": ("model.dim=256", "model.hidden_dim=512", "model.n_layers=2"),
    "dim 128, 6 layers": ("model.dim=128", "model.hidden_dim=384", "model.n_layers=6"),
    "learning rate 16e-3": ("optimizer.learning_rate=16e-3",),
    "length 256": ("length=256", "batch=8"),
    "weight decay 0.1": ("optimizer.weight_decay=0.1",),
    "without moving average": ("ema_decay=0",),
    "learning rate 4e-3": ("optimizer.learning_rate=4e-3",),
    "without z-loss": ("z_loss=0",),
    "batch 8, half the steps": ("batch=8", "steps=100"),
    "long: the recipe itself": LONG,
    "long: weight decay 0.2, length 256": (
        *LONG,
        "steps=1700",
        "optimizer.weight_decay=0.2",
        "length=256",
        "batch=8",
        "model.max_seq_len=256",
    ),
}


def training_stories(data: Path) -> list[str]:
    """The stories of both training files, with an empty line between paragraphs.

    One file has a line break between stories and an empty line between paragraphs, the other a marker between stories and a
    line break between paragraphs.
    """
    first = re.split(r"(?<!\n)\n(?!\n)", text_of(data / "tinystories-train.txt"))
    second = text_of(data / "tinystories-v2-train.txt").split("<|endoftext|>")
    stories = [*first, *(re.sub(r"\s*\n\s*", PARAGRAPH, story.strip()) for story in second)]
    return [story.strip() for story in stories if story.strip()]


def validation_stories(data: Path) -> list[str]:
    """The stories of the validation file, divided at paragraphs that match `OPENING`."""
    stories: list[list[str]] = []
    for paragraph in text_of(data / "tinystories-valid.txt").split(PARAGRAPH):
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
    if found := shared_stories(training, validation):
        raise SystemExit(f"{len(found)} validation stories occur in the training text, the first: {found[0][:80]!r}")
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
    (found,) = llama_jax.generate(config, params, [ids], max_new_tokens=new, sampling=sampling, stop_tokens=ends)
    return tokenizer.decode(ids + [token for token in found.tokens if token not in ends])


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

    data: Path = DATA
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
class Sweep:
    """Run the entries of `SWEEP` that are missing from the results, and print the table."""

    data: Path = DATA
    """Folder of the TinyStories files."""
    workdir: Path = ROOT / "build" / "bundled"
    """Folder of stories and vocabularies; the runs are not kept."""
    results: Path = RESULTS / "bundled_sweep.json"
    """The table, one entry per name."""

    def run(self) -> None:
        table = json.loads(self.results.read_text()) if self.results.exists() else {}
        for name, changes in SWEEP.items():
            if name not in table:
                table[name] = self.measure(changes)
                write_report(self.results, table)
        for name, row in sorted(table.items(), key=lambda item: item[1]["bits_per_byte"]):
            parameters, tokens = f"{row['parameters']:,}", f"{row['tokens']:,}"
            print(f"{row['bits_per_byte']:.4f}  {parameters:>9s} parameters {tokens:>9s} tokens  {name}")

    def measure(self, changes: tuple[str, ...]) -> dict[str, Any]:
        varied = override(recipe(), (*SHORT, *changes))
        workdir = self.workdir / "sweep"
        shutil.rmtree(workdir, ignore_errors=True)
        files = write_files(self.data, self.workdir, varied.model.vocab_size)
        done = run(varied, files, workdir)
        if done.stopped is not None:
            raise SystemExit(f"stopped by {done.stopped}; finished entries are kept: run the same command to resume")
        found = done.validation
        return {
            "changes": list(changes),
            "bits_per_byte": found.numbers["bits_per_byte"],
            "loss": found.loss,
            "parameters": parameter_count(varied.model),
            "tokens": varied.steps * varied.batch * varied.length,
        }


@dataclass(frozen=True)
class Scale:
    """Write and print the bits per byte of the validation stories with other methods, for comparison."""

    data: Path = DATA
    """Folder of the TinyStories files."""
    workdir: Path = ROOT / "build" / "bundled"
    """Folder of stories and vocabulary."""
    results: Path = RESULTS / "bundled_scale.json"
    """The figures."""

    def run(self) -> None:
        import llama_jax
        from llama_jax.formats.loading import bundled

        training, validation = training_stories(self.data), validation_stories(self.data)
        tokenizer = llama_jax.load_tokenizer(bundled())
        # Measured like the model: each story separately, including the token that ends it.
        tokens = lambda stories: [tokenizer.encode(story, bos=False, eos=True) for story in stories]
        letters = lambda stories: [[*story.encode(), 256] for story in stories]
        vocab_size, size = tokenizer.vocab_size, sum(len(story.encode()) for story in validation)
        before, text = ("\n".join(stories).encode() for stories in (training, validation))
        found = {
            "xz of the validation text": 8 * packed(text) / size,
            "xz, having seen the training text": 8 * (packed(before + text) - packed(before)) / size,
            "5-grams of bytes": ngram_bits(letters(training), letters(validation), 257, 5) / size,
            "3-grams of the model's tokens": ngram_bits(tokens(training), tokens(validation), vocab_size, 3) / size,
            "the bundled model": measured(bundled(), self.data, self.workdir).bits_per_byte,
        }
        peer = self.data.parent / "stories260K"
        if peer.exists():
            found["stories260K, trained on far more of it"] = measured(peer, self.data, self.workdir).bits_per_byte
        write_report(self.results, found)
        for name, bits in sorted(found.items(), key=lambda item: item[1]):
            print(f"{name:45s} {bits:.3f}")


@dataclass(frozen=True)
class Stories:
    """Write the validation stories one per line, for `llama-jax eval`; the original file has no separators."""

    path: tyro.conf.Positional[Path] = ROOT / "build" / "bundled" / VALIDATION
    """Output file, .jsonl."""
    data: Path = DATA
    """Folder of the TinyStories files."""

    def run(self) -> None:
        stories = validation_stories(self.data)
        print(f"{write_stories(self.path, stories)}: {len(stories):,} stories")


def packed(text: bytes) -> int:
    """Size in bytes with xz's best compression."""
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def ngram_bits(training: list[list[int]], validation: list[list[int]], vocab_size: int, order: int) -> float:
    """Bits of the validation sequences by interpolated n-grams (Witten & Bell 1991, method C) of the training sequences."""
    counts: list[dict[tuple[int, ...], Counter[int]]] = [defaultdict(Counter) for _ in range(order)]
    for sequence in training:
        for at, token in enumerate(sequence):
            for length in range(min(order, at + 1)):
                counts[length][tuple(sequence[at - length : at])][token] += 1
    bits = 0.0
    for sequence in validation:
        for at, token in enumerate(sequence):
            probability = 1 / vocab_size
            for length in range(min(order, at + 1)):
                seen = counts[length].get(tuple(sequence[at - length : at]))
                if seen:
                    probability = (seen[token] + len(seen) * probability) / (seen.total() + len(seen))
            bits -= math.log2(probability)
    return bits


if __name__ == "__main__":
    tyro.cli(Train | Sweep | Scale | Stories).run()
