"""Write a small model in every format, with that format's own writer, for the tests.

    pip install -e ".[parity]"
    python tests/make_format_goldens.py

torch writes Meta's ``.pth`` in 1, 2, 4 and 8 ranks, ``pytorch_model.bin``, single and sharded, and llama2.c's ``ckpt.pt``;
llama.cpp's quantizer writes a Q4_K_M. These files go to ``tests/goldens/formats``. Formats that need only NumPy or the gguf
package (llama2.c versions 0 to 2, GGUF) are written by the tests with the functions below.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from make_goldens import GOLDENS, random_tensors

from llama_jax import LlamaConfig, rotary_frequencies
from llama_jax.formats.huggingface import HF_NAMES, config_to_dict

FORMATS = GOLDENS / "formats"
# Eight key/value heads and sizes divisible by eight: Meta's largest releases have eight ranks.
SMALL = LlamaConfig(
    vocab_size=40,
    dim=16,
    n_layers=2,
    n_heads=8,
    n_kv_heads=8,
    hidden_dim=32,
    max_seq_len=4096,  # a reader assumes this for Meta's files with these settings
    norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_embeddings=False,
)
# Blocks of 256 numbers, as in K-quants.
WIDE = LlamaConfig(
    vocab_size=64,
    dim=256,
    n_layers=1,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=256,
    max_seq_len=128,
    norm_eps=1e-5,
    rope_theta=10_000.0,
    tie_embeddings=True,
)
META = {
    "embedding": "tok_embeddings.weight",
    "final_norm": "norm.weight",
    "lm_head": "output.weight",
    "attention_norm": "layers.{}.attention_norm.weight",
    "q": "layers.{}.attention.wq.weight",
    "k": "layers.{}.attention.wk.weight",
    "v": "layers.{}.attention.wv.weight",
    "out": "layers.{}.attention.wo.weight",
    "ffn_norm": "layers.{}.ffn_norm.weight",
    "gate": "layers.{}.feed_forward.w1.weight",
    "up": "layers.{}.feed_forward.w3.weight",
    "down": "layers.{}.feed_forward.w2.weight",
}
GGUF = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
    "attention_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "out": "blk.{}.attn_output.weight",
    "ffn_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
}
GGUF |= {f"{part}_bias": GGUF[part].replace(".weight", ".bias") for part in ("q", "k", "v", "out", "gate", "up", "down")}


def renamed(config: LlamaConfig, tensors: dict[str, np.ndarray], names: dict[str, str]) -> dict[str, np.ndarray]:
    """The tensors by another format's names, q and k in the interleaved layout: row 2i of a head is row i of its half."""
    found = {}
    for part, name in ((part, name) for part, name in HF_NAMES.items() if part in names):
        for i in range(config.n_layers if "{}" in name else 1):
            if name.format(i) in tensors:
                weight = tensors[name.format(i)]
                if part.removesuffix("_bias") in ("q", "k"):
                    heads = weight.reshape(-1, 2, config.head_dim // 2, *weight.shape[1:])
                    weight = heads.swapaxes(1, 2).reshape(weight.shape)
                found[names[part].format(i)] = np.ascontiguousarray(weight)
    return found


def write_meta(
    folder: Path, config: LlamaConfig, tensors: dict[str, np.ndarray], ranks: int, *, by_vocabulary=False, buffers=True
) -> None:
    """Write Meta's layout: fairscale's column-parallel weights split by rows, row-parallel ones by columns, norms whole."""
    import torch

    folder.mkdir(parents=True)
    state = renamed(config, tensors, META)
    axes = {name: 1 for name in state if "attention.wo" in name or "w2" in name}
    axes |= {name: 0 for name in state if any(w in name for w in (".wq", ".wk", ".wv", ".w1", ".w3", "output"))}
    axes[META["embedding"]] = 0 if by_vocabulary else 1
    for rank in range(ranks):
        part = {
            name: torch.from_numpy(np.ascontiguousarray(np.split(a, ranks, axes[name])[rank]) if name in axes else a.copy())
            for name, a in state.items()
        }
        if buffers:
            part["rope.freqs"] = torch.from_numpy(rotary_frequencies(config)[0])
        torch.save(part, folder / f"consolidated.{rank:02}.pth")
    settings = dict(dim=config.dim, n_layers=config.n_layers, n_heads=config.n_heads, norm_eps=config.norm_eps)
    (folder / "params.json").write_text(json.dumps(settings | dict(multiple_of=32, vocab_size=-1)))


def write_pytorch_bin(folder: Path, config: LlamaConfig, tensors: dict[str, np.ndarray], files: int = 1) -> None:
    """Write a folder as transformers did before safetensors, with the buffers of that time."""
    import torch

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_to_dict(config)))
    state = {name: torch.from_numpy(a.copy()) for name, a in tensors.items()}
    for i in range(config.n_layers):
        state[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = torch.from_numpy(rotary_frequencies(config)[0])
    if files == 1:
        torch.save(state, folder / "pytorch_model.bin")
        return
    weight_map = {name: f"pytorch_model-{i % files + 1:05}-of-{files:05}.bin" for i, name in enumerate(state)}
    for file in set(weight_map.values()):
        torch.save({name: state[name] for name in state if weight_map[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_training(path: Path, config: LlamaConfig, tensors: dict[str, np.ndarray]) -> None:
    """Write llama2.c's ckpt.pt: the state of a compiled model and of an optimizer, and settings as plain Python values."""
    import torch

    state = {f"_orig_mod.{name}": torch.from_numpy(a) for name, a in renamed(config, tensors, META).items()}
    if config.tie_embeddings:
        state["_orig_mod.output.weight"] = state["_orig_mod.tok_embeddings.weight"]
    state["_orig_mod.layers.0.attention.mask"] = torch.full((1, 1, 4, 4), float("-inf")).triu(1)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], fused=False)
    weight.sum().backward()
    optimizer.step()
    args = dict(dim=config.dim, n_layers=config.n_layers, n_heads=config.n_heads, n_kv_heads=config.n_kv_heads)
    args |= dict(vocab_size=config.vocab_size, multiple_of=32, max_seq_len=config.max_seq_len, dropout=0.0)
    checkpoint = dict(model=state, optimizer=optimizer.state_dict(), model_args=args, iter_num=7)
    torch.save(checkpoint | dict(best_val_loss=torch.tensor(1.5), config={"device": "cpu", "compile": True}), path)


def write_gguf(
    path: Path,
    config: LlamaConfig,
    tensors: dict[str, np.ndarray],
    kind: str = "F32",
    extra: Mapping[str, np.ndarray] = MappingProxyType({}),
    **more,
) -> None:
    """Write with the gguf package, as llama.cpp's conversion does, and with additional tensors and settings."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.hidden_dim)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    for key, value in more.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    for name, a in (renamed(config, tensors, GGUF) | extra).items():
        stored = GGMLQuantizationType["F32" if a.ndim == 1 else kind]
        writer.add_tensor(name, quants.quantize(a, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_llama2c(path: Path, config: LlamaConfig, tensors: dict[str, np.ndarray], version: int, group: int = 64) -> None:
    """Write as llama2.c's export.py does: legacy (0), float32 with a header (1), int8 in groups (2)."""
    state = renamed(config, tensors, META)
    c, layers = config, range(config.n_layers)

    def all_layers(*parts: str) -> list[np.ndarray]:
        return [state[META[part].format(i)] for part in parts for i in layers]

    sizes = [c.dim, c.hidden_dim, c.n_layers, c.n_heads, c.n_kv_heads, c.vocab_size, c.max_seq_len]
    embedding, final_norm = state[META["embedding"]], state[META["final_norm"]]
    head = [] if c.tie_embeddings else [state[META["lm_head"]]]
    matrices = [embedding, *all_layers("q", "k", "v", "out", "gate", "down", "up"), *head]
    norms = [*all_layers("attention_norm"), *all_layers("ffn_norm"), final_norm]
    with path.open("wb") as file:
        if version == 0:
            sizes[5] *= 1 if c.tie_embeddings else -1
            file.write(struct.pack("<7i", *sizes))
            angles = np.outer(np.arange(c.max_seq_len), rotary_frequencies(c)[0])
            order = [embedding, *all_layers("attention_norm", "q", "k", "v", "out", "ffn_norm", "gate", "down", "up")]
            for a in [*order, final_norm, np.cos(angles), np.sin(angles), *head]:
                file.write(np.ascontiguousarray(a, "<f4").tobytes())
            return
        while version == 2 and c.dim % group:
            group //= 2
        start = struct.pack("<Ii7iB", 0x616B3432, version, *sizes, c.tie_embeddings)
        start += struct.pack("<i", group) if version == 2 else b""
        file.write(start.ljust(256, b"\0"))
        for a in norms if version == 2 else [*norms, *matrices]:
            file.write(a.tobytes())
        for a in matrices if version == 2 else []:
            numbers, scales = quantize_int8(a, group)
            file.write(numbers.tobytes() + scales.tobytes())


def quantize_int8(a: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers int8[groups, group] and scales float32[groups] of llama2.c's version 2."""
    rows = a.reshape(-1, group)
    scales = (np.abs(rows).max(1) / 127).astype(np.float32)
    return np.round(rows / scales[:, None]).astype(np.int8), scales


def main() -> None:
    import shutil

    shutil.rmtree(FORMATS, ignore_errors=True)
    FORMATS.mkdir(parents=True)
    tensors = random_tensors(SMALL)
    for ranks in (1, 2, 4, 8):
        write_meta(FORMATS / f"meta-{ranks}", SMALL, tensors, ranks, buffers=ranks < 4)
    write_meta(FORMATS / "meta-vocabulary", SMALL, tensors, 2, by_vocabulary=True)
    write_pytorch_bin(FORMATS / "pytorch", SMALL, tensors)
    write_pytorch_bin(FORMATS / "pytorch-sharded", SMALL, tensors, files=2)
    write_training(FORMATS / "ckpt.pt", SMALL, tensors)
    quantize_with_llama_cpp(FORMATS / "q4_k_m.gguf")
    for path in sorted(FORMATS.rglob("*")):
        if path.is_file():
            print(f"{path.relative_to(FORMATS)}: {path.stat().st_size / 1000:.1f} kB")


def quantize_with_llama_cpp(path: Path) -> None:
    """Write WIDE in Q4_K_M with llama.cpp, and llama.cpp's logits of the tokens 0 to 15 next to it."""
    import llama_cpp

    plain = path.with_suffix(".f32")
    write_gguf(plain, WIDE, random_tensors(WIDE), **{"tokenizer.ggml.model": "no_vocab"})
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    assert llama_cpp.llama_model_quantize(str(plain).encode(), str(path).encode(), params) == 0
    plain.unlink()

    context = llama_cpp.llama_context_default_params()
    context.n_ctx, context.n_batch, context.n_threads = 64, 64, 1
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
    state = llama_cpp.llama_init_from_model(model, context)
    batch = llama_cpp.llama_batch_init(16, 0, 1)
    batch.n_tokens = 16
    for i in range(16):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = i, i, 1, 0, 1
    assert llama_cpp.llama_decode(state, batch) == 0
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(state), (16, WIDE.vocab_size)).copy()
    np.save(path.with_suffix(".npy"), logits)


if __name__ == "__main__":
    main()
