"""``llama-jax fetch``: a model of the Hugging Face hub on this machine's disk."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from llama_jax.cli.page import size


@dataclass(frozen=True)
class Fetch:
    """Download a model from the Hugging Face hub: only the files that llama-jax reads. It prints the path for --model.

    A model behind a licence: open its page in a browser, accept the licence there, then log in with hf auth login or set
    HF_TOKEN. Files that were downloaded before are not downloaded again.

    Afterwards --model hf://ORG/NAME finds the files in the cache; without a network give --model the printed path.
    """

    repository: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="ORG/NAME")]]
    """The repository. ORG/NAME/FILE.gguf or ORG/NAME/FOLDER is one model of a repository with several."""
    revision: Annotated[str | None, tyro.conf.arg(metavar="REVISION")] = None
    """A branch, tag or commit; by default the newest commit."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Where to put the files; by default the cache of huggingface_hub (HF_HOME moves it)."""

    def run(self) -> None:
        if not sys.stderr.isatty():  # progress is for people, and the hub's library shows it in logs as well
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        from llama_jax.formats.hub_download import fetch

        found = fetch(self.repository, self.revision, self.out)
        print(
            f"{found.files} file{'s' * (found.files > 1)}, {size(found.size)}; give this path to --model:", file=sys.stderr
        )
        print(found.path)
