"""`llama-jax data build` on the machines of a Ray cluster, as a Ray Data job.

    pip install -e ".[data]" "ray[data]>=2.40"
    python docs/clusters/build_ray.py TEXTS --out DIR --tokenizer PATH [--address auto] [--drop-duplicates] ...

All machines see the texts, the tokenizer and the folder of the corpus under the same paths. What comes out is the same, byte
for byte, as on one machine; stopped, the same command goes on, here or there. Ray starts a task again whose machine is lost.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import ray
import tyro

from llama_jax.data.build_corpus import BuildOptions, Call, CallProgress, tokenize_files
from llama_jax.data.documents import DocumentFormat
from llama_jax.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Tokenize files into a corpus of token ids, on the machines of a Ray cluster."""

    files: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE ...")]]
    """Text, JSONL, Parquet or Arrow, or folders of them."""
    out: Path
    """Folder of tokens.corpus."""
    tokenizer: Path
    """A vocabulary's file or folder."""
    address: str | None = None
    """Of the cluster, or auto; by default one is started on this machine."""
    cpus: int | None = None
    """Of a cluster that is started here; by default as many as there are."""
    unit: int | None = None
    """Megabytes of a file that a task takes, about; by default a 128th part of all files, between 8 and 64."""
    drop_duplicates: bool = False
    """Keep only the first of documents with the same tokens."""
    reading: DocumentFormat = DocumentFormat()
    """Where documents end."""


def over_ray(calls: Sequence[Call], progress: CallProgress | None = None) -> list[Any]:
    """The workers of a build: each call is a task, of one processor."""
    rows = [{"number": number, "call": pickle.dumps(call)} for number, call in enumerate(calls)]
    if not rows:
        return []
    data = ray.data.from_items(rows, override_num_blocks=len(rows)).map(call_one, num_cpus=1)
    found: dict[int, Any] = {}
    for row in data.iter_rows():
        found[row["number"]] = pickle.loads(row["found"])
        if isinstance(found[row["number"]], UserError):
            raise found[row["number"]]
        if progress is not None:
            progress(len(found), len(calls))
    return [found[number] for number in range(len(calls))]


def call_one(row: dict[str, Any]) -> dict[str, Any]:
    """Call a function there; what the user can mend is given back, as one line."""
    function, *args = pickle.loads(row["call"])
    try:
        found = function(*args)
    except UserError as error:
        found = error
    return {"number": row["number"], "found": pickle.dumps(found)}


def main(arguments: Arguments) -> None:
    """Start or join the cluster, and build."""
    environment = {"env_vars": {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}}
    ray.init(address=arguments.address, num_cpus=arguments.cpus, runtime_env=environment)
    unit = None if arguments.unit is None else arguments.unit << 20
    options = BuildOptions(arguments.reading, unit, arguments.drop_duplicates)
    try:
        info = tokenize_files(arguments.files, arguments.out, arguments.tokenizer, options=options, workers=over_ray)
    except UserError as error:
        raise SystemExit(f"build_ray: {error}") from None
    print(f"{info.tokens:,} tokens of {info.documents:,} documents in {arguments.out}")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
