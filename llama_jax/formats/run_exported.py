"""Continue texts, or lists of token ids, with the exported model in this file's folder. It needs jax and flatbuffers.

    python run.py --max-new-tokens 200 1,403,407,261
    python run.py --temperature 0.8 --seed 1 "Once upon a time"

Texts also need the library for the tokenizer's file: tokenizers for tokenizer.json, sentencepiece for tokenizer.model.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export


def load(folder):
    """The two programs, the weights, and the shapes of the state."""
    programs = [export.deserialize(bytearray((folder / f"{name}.stablehlo").read_bytes())) for name in ("prefill", "decode")]
    (shapes, state, *_), _ = jax.tree.unflatten(programs[0].in_tree, programs[0].in_avals)
    file = np.memmap(folder / "weights.safetensors", np.uint8, "r")
    begin = 8 + int(file[:8].view("<u8")[0])  # the length of the JSON header, the header, the tensors
    places = json.loads(file[8:begin].tobytes())
    offsets = {name: places[name]["data_offsets"] for name in shapes}
    raw = {name: file[begin + first : begin + last] for name, (first, last) in offsets.items()}
    weights = {name: jax.device_put(raw[name].view(x.dtype).reshape(x.shape)) for name, x in shapes.items()}
    return *(jax.jit(program.call, donate_argnums=1) for program in programs), weights, state


def generate(about, model, prompts, max_new_tokens, **sampling):
    """The continuation of each prompt, as token ids before the first of about["stop"]; greedy by default."""
    prefill, decode, weights, shapes = model
    rows = [*prompts, *[[0]] * (about["batch"] - len(prompts))]
    lengths, size = np.array([len(row) for row in rows], np.int32), about["prefill"]
    if len(rows) > about["batch"] or min(lengths) < 1 or max(lengths) + max_new_tokens > about["context"]:
        raise ValueError(f"at most {about['batch']} prompts of {about['context']} tokens, continuations included")
    if unknown := [name for name in sampling if name not in about["sampling"]]:
        raise ValueError(f"{unknown[0]} is not one of {', '.join(about['sampling'])}")
    if max_new_tokens < 1 or not all(0 <= token < about["vocabulary"] for row in rows for token in row):
        raise ValueError(f"max_new_tokens must be at least 1, and token ids must be below {about['vocabulary']}")
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    values = {name: sampling.get(name, x["default"]) for name, x in about["sampling"].items()}
    values = {name: np.full(len(rows), value, about["sampling"][name]["dtype"]) for name, value in values.items()}
    for begin in range(0, max(lengths), size):
        part = [row[begin : begin + size] for row in rows]
        tokens = np.array([row + [0] * (size - len(row)) for row in part], np.int32)
        state, _ = prefill(weights, state, tokens, lengths, values)  # also returns the logits, for a custom sampler
    steps, ended = [np.asarray(state["token"])], np.arange(len(rows)) >= len(prompts)
    while len(steps) < max_new_tokens and not (ended := ended | np.isin(steps[-1], about["stop"])).all():
        state, _ = decode(weights, state, values)
        steps.append(np.asarray(state["token"]))
    chosen = np.stack(steps, axis=1)[: len(prompts)].tolist()
    return [row[: next((i for i, token in enumerate(row) if token in about["stop"]), None)] for row in chosen]


def tokenizer(folder, prefix):
    """The functions that encode a text to ids and decode ids."""
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        whole = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return lambda text: prefix + whole.encode(text, add_special_tokens=False).ids, whole.decode
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    known = lambda ids: [i for i in ids if i < len(pieces)]  # the others are padding of the embedding
    return lambda text: prefix + pieces.encode(text), lambda ids: pieces.decode(known(ids))


def main(folder):
    about = json.loads((folder / "export.json").read_text())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    for name, x in about["sampling"].items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(x["default"]), default=x["default"])
    options = vars(parser.parse_args())
    texts, limit = options.pop("prompts"), options.pop("max_new_tokens")
    encode, decode = (lambda text: [int(i) for i in text.split(",")]), (lambda ids: ",".join(map(str, ids)))
    if not all(text.replace(",", "").isdigit() for text in texts):
        encode, decode = tokenizer(folder, about["prefix"])
    for row in generate(about, load(folder), [encode(text) for text in texts], limit, **options):
        print(decode(row))


if __name__ == "__main__":
    main(Path(__file__).parent)
