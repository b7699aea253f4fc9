"""``llama-jax needle``: does a model find a sentence in a long text?"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from llama_jax.cli.page import columns, printable
from llama_jax.cli.paths import ModelPath
from llama_jax.cli.plot import check_picture, save_picture
from llama_jax.cli.reading import TextOptions, numbers
from llama_jax.cli.rope import say_beyond

if TYPE_CHECKING:
    import numpy as np

    from llama_jax.data import Corpus
    from llama_jax.runs.needle import NeedleTest
    from llama_jax.tokenizers import Tokenizer


@dataclass(frozen=True)
class Needle(TextOptions):
    """Hide a pass key in a text at every depth of every length, and measure whether the model gives it when asked.

    The key's probability is compared with that of wrong ones, so that small models, which hardly ever give all of its
    digits, can be compared as well.
    """

    path: tyro.conf.Positional[ModelPath]
    """A model's folder or file, of any format that is read."""
    lengths: Annotated[str, tyro.conf.arg(metavar="N,N,...")] = ""
    """Tokens of the prompts with their answers, as in 256,512,1024; they may go beyond the model's context.
    By default that context, a half and a quarter of it."""
    depths: Annotated[str, tyro.conf.arg(metavar="X,X,...")] = "0,0.25,0.5,0.75,1"
    """Where to put the needle: 0 is the beginning of the text, 1 its end."""
    trials: int = 10
    """Prompts of each length and depth; a multiple of --wrong-keys plus 1 hides each key equally often."""
    wrong_keys: int = 9
    """Numbers that the key is compared with."""
    digits: int = 5
    """Digits of a key."""
    statement: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    """The needle, with {key} in it. By default: The pass key is {key}. Remember it. {key} is the pass key."""
    question: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    """What follows the text; ends with {key}. By default: What is the pass key? The pass key is {key}"""
    seed: int = 0
    """Seed of the keys and of the pieces of the text."""
    batch: int | None = None
    """Prompts of a batch; by default 1 on a CPU and as many as make up 32,768 tokens elsewhere."""
    plot: Path | None = None
    """Draw heat maps of depth over length, as .png, .pdf or .svg. Needs the extra 'plot'."""

    def run(self) -> None:
        self.check()
        lengths = numbers("lengths", self.lengths, int) if self.lengths else ()
        depths = numbers("depths", self.depths, float)
        if self.plot is not None:
            check_picture("plot", self.plot)
        from tqdm import tqdm

        from llama_jax.runs.haystack import QUESTION, STATEMENT, Hidden, prepare
        from llama_jax.runs.needle import needle
        from llama_jax.runs.plot import draw_needle

        # Quick checks come first: no mistake should be found after minutes of loading.
        subject = self.open(self.path)
        config = subject.config
        lengths = lengths or tuple(config.max_seq_len // part for part in (4, 2, 1))
        haystack = text_of(self.corpus(subject.tokenizer, lengths), subject.tokenizer)
        hidden = Hidden(
            lengths=lengths,
            depths=depths,
            trials=self.trials,
            wrong_keys=self.wrong_keys,
            seed=self.seed,
            statement=self.statement or STATEMENT,
            question=self.question or QUESTION,
            digits=self.digits,
            batch=self.batch,
        )
        prepare(config, subject.tokenizer, haystack, hidden)
        say_beyond(config, lengths)
        params = self.load(subject)

        seconds = subject.stopwatch()
        bar = partial(tqdm, desc="searching", unit=" pieces", leave=False, disable=None)
        found = needle(config, params, subject.tokenizer, haystack, progress=bar, **asdict(hidden))
        for cell in found.cells:
            if not math.isfinite(cell.log_probability):
                raise self.not_finite(f"log-probability at length={cell.length}", cell.log_probability)
        tokens = sum(cell.length * cell.trials for cell in found.cells)
        facts = {**self.facts(subject, params, tokens, seconds()), **asdict(hidden), **asdict(found)}
        self.show(facts, as_page(found, facts))
        if self.plot is not None:  # last, so that the results are not lost if the picture cannot be written
            name = f"{self.path} {self.rope}".strip()
            save_picture(draw_needle(found, context=config.max_seq_len, title=name), self.plot)


def text_of(corpus: Corpus, tokenizer: Tokenizer) -> np.ndarray:
    """All documents concatenated, without the tokens that begin and end them: int[n]."""
    import numpy as np

    parts = [corpus.document(number) for number in range(corpus.document_count)]
    joined = np.concatenate(parts) if parts else np.zeros(0, np.uint16)
    return joined[~np.isin(joined, [id for id in (tokenizer.bos_id, tokenizer.eos_id) if id >= 0])]


def as_page(found: NeedleTest, facts: dict[str, Any]) -> str:
    """A table of depth over length for each measure."""
    keys = found.wrong_keys + 1
    fair = facts["trials"] % keys == 0
    chance = (f" ({1 / keys:.0%} by chance)", " (0 by chance)") if fair else ("", "")
    tables = (
        (f"key preferred to {found.wrong_keys} wrong ones{chance[0]}", "chosen", "{:.0%}"),
        (f"log-probability above that of the wrong ones, nats{chance[1]}", "margin", "{:+.2f}"),
        ("key written exactly by greedy decoding", "exact", "{:.0%}"),
    )
    parts = [printable(facts["model"]) + (f", rope {printable(facts['rope'])}" if facts["rope"] else "")]
    for title, name, form in tables:
        grid = found.grid(name)
        rows = [["depth", *(f"{length:,}" for length in found.lengths)]]
        rows += [[f"{depth:.0%}", *map(form.format, row)] for depth, row in zip(found.depths, grid, strict=True)]
        rows.append(["all", *map(form.format, grid.mean(axis=0))])
        parts.append(f"{title}\n{columns(rows, right=range(len(found.lengths) + 1))}")
    beyond = [f"{length:,}" for length in found.lengths if length > facts["context"]]
    if beyond:
        parts.append(f"{', '.join(beyond)}: beyond the model's context of {facts['context']:,}.")
    if not fair:
        parts.append(
            f"{facts['trials']} trials do not hide each of {keys} keys equally often, so the model's preferences among"
            f" these numbers do not cancel out: give a multiple of {keys}."
        )
    return "\n\n".join(parts)
