"""Folders in the layouts of the Hugging Face hub and its datasets library: which files are data, and of which split."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from llama_jax.data.errors import DataError
from llama_jax.errors import shown

SPLITS = "dataset_dict.json"  # beside a folder for each split, by DatasetDict.save_to_disk
STATE = "state.json"  # beside the files of one, by Dataset.save_to_disk
SPLIT = r"(?P<split>(?:train|test|validation|valid|val|dev|eval)\w*)"
NUMBERS = r"-\d{5}-of-\d{5}(?:-[0-9a-f]+)?"
# On the hub data/train-00000-of-00002.parquet; in the library's cache name-train.arrow or name-train-00000-of-00002.arrow.
NUMBERED = re.compile(rf"{SPLIT}{NUMBERS}\.(?:parquet|jsonl|txt)(?:\.gz|\.zst)?")
CACHED = re.compile(rf"\w+-{SPLIT}(?:{NUMBERS})?\.arrow")


def data_files(folder: Path, files: Sequence[Path]) -> list[Path]:
    """The files below a folder that are the one split of a dataset; all of them if the folder is no dataset.

    Raises:
      DataError: it holds several splits, which would all be trained on.
    """
    for file in files:
        for above in (file.parent, *file.parent.parents):
            if (above / SPLITS).is_file():
                names = sorted(entry.name for entry in above.iterdir() if (entry / STATE).is_file())
                raise _several(folder, names, f"{above}/{names[0] if names else 'NAME'}")
            if above == folder:
                break
    found = [file for file in files if file.suffix != ".arrow" or _is_saved(file)]
    splits: dict[str, Path] = {}
    for file in found:
        if (match := NUMBERED.fullmatch(file.name) or CACHED.fullmatch(file.name)) is not None:
            splits.setdefault(match["split"], file)
    if len(splits) > 1:
        name, file = next((pair for pair in splits.items() if pair[0] == "train"), next(iter(splits.items())))
        raise _several(folder, sorted(splits), f"{file.parent}/*{name}*")
    return found


def _is_saved(file: Path) -> bool:
    """Whether an Arrow file belongs to the dataset saved in its folder, which may also hold cached results of computations.

    Raises:
      DataError: the list of its files is damaged.
    """
    state = file.parent / STATE
    if not state.is_file():
        return True
    try:
        names = {entry["filename"] for entry in json.loads(state.read_bytes())["_data_files"]}
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{state} does not list the files of a dataset ({type(error).__name__}); save it again") from None
    return file.name in names


def _several(folder: Path, names: list[str], example: str) -> DataError:
    return DataError(f"{folder} holds several splits of a dataset, {shown(names, 200)}; give one of them, as {example}")
