"""The interface of a weight format, a checkpoint that it opened, and the tensors that checkpoints contain.

`TENSOR_NAMES` has the names of these tensors in each format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from llama_jax.config import LlamaConfig
from llama_jax.errors import short_repr
from llama_jax.formats.lazy_tensors import TensorInfo
from llama_jax.formats.model_folder import ModelMetadata
from llama_jax.model.params import ParamSpec, shape_of
from llama_jax.storage import Location
from llama_jax.tokenizers import Tokenizer


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint that was recognized; its weights have not been read.

    Attributes:
      format: a description, such as "Hugging Face safetensors".
      path: the file or folder, for messages.
      config: the configuration from the files.
      tensors: all tensors of the model, by the format's names: a `Tensor` each, but a `TensorInfo` in orbax.
      names: the format's name for each part of a Llama, where "{}" is the layer; empty in orbax, which stores parameters.
      interleaved: whether the rows of q and k are in the interleaved rotary layout (as in Meta, llama2.c and GGUF files).
      tokenizer: reads the vocabulary inside the file or next to it; returns None if there is none.
      metadata: reads the descriptions next to the weights.
      notes: lines to log when the model is read, such as which tensors of the files it does not use.
    """

    format: str
    path: Location
    config: LlamaConfig
    tensors: Mapping[str, Any]
    names: Mapping[str, str]
    interleaved: bool
    tokenizer: Callable[[], Tokenizer | None]
    metadata: Callable[[], ModelMetadata] = ModelMetadata
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class WeightFormat:
    """A weight format: all that the rest of the library needs to know about it. `loading.WEIGHT_FORMATS` lists them.

    Attributes:
      name: as in `save` and on the command line.
      recognizes: whether a path is a model of this format: a file, a folder, or a file of such a folder.
      open: opens the model at such a path; its weights are not read.
      write: takes a new file or folder, an `OpenedCheckpoint`, a tokenizer, the type of the tensors (None keeps theirs) and
        `progress`, which wraps the list of tensors; None if the format is read-only.
      write_params: writes parameters in memory instead: takes a new folder, the configuration, the parameters, and the path
        for messages.
      suffixes: suffixes of files that are whole models, the one that is written first; empty if a model is a folder.
      is_whole: whether a file with such a suffix in a folder is a model, or the first file of one.
      files: takes the names in a folder of the Hub, a function that reads one of them, and the folder's name for messages;
        returns the files of a model of this format, without its vocabulary, or None. Only if a model is a folder.
      dtypes: the dtypes in which `save` can write it.
      can_keep: whether a tensor's blocks can be written unchanged.
      in_stores: whether it can be written to an object store.
      names_parts: whether it can store the names in `LlamaConfig.parts`.
    """

    name: str
    recognizes: Callable[[Location], bool]
    open: Callable[[Location], Any]
    write: Callable[..., None] | None = None
    write_params: Callable[..., None] | None = None
    suffixes: tuple[str, ...] = ()
    is_whole: Callable[[Location], bool] | None = None
    files: Callable[[Collection[str], Callable[[str], bytes], str], list[str] | None] | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    can_keep: Callable[[TensorInfo], bool] = lambda tensor: False
    in_stores: bool = False
    names_parts: bool = False

    @property
    def is_folder(self) -> bool:
        return not self.suffixes


@dataclass(frozen=True)
class TensorPart:
    """A tensor of a checkpoint that is a parameter, or part of one.

    Attributes:
      name: the key of its name in the formats' tables.
      axes: axes of the tensor, as formats store it: rows are outputs.
      width: its share of the parameter's second axis; "" if it is the whole parameter.
      rotary: whether the rows of each head depend on the rotary layout, which differs between formats.
    """

    name: str
    axes: str
    width: str = ""
    rotary: bool = False


class TensorNames(NamedTuple):
    """The names of a tensor in files, where "{}" is the layer; "" if the format has no models with it."""

    huggingface: str
    gguf: str
    meta: str = ""


# Names that differ between Hugging Face families are in `huggingface.names_of`.
TENSOR_NAMES = {
    "embedding": TensorNames("model.embed_tokens.weight", "token_embd.weight", "tok_embeddings.weight"),
    "final_norm": TensorNames("model.norm.weight", "output_norm.weight", "norm.weight"),
    "lm_head": TensorNames("lm_head.weight", "output.weight", "output.weight"),
} | {
    name: TensorNames(f"model.layers.{{}}.{hf}", f"blk.{{}}.{gguf}", meta and f"layers.{{}}.{meta}")
    for name, hf, gguf, meta in (
        ("attention_norm", "input_layernorm.weight", "attn_norm.weight", "attention_norm.weight"),
        ("q", "self_attn.q_proj.weight", "attn_q.weight", "attention.wq.weight"),
        ("k", "self_attn.k_proj.weight", "attn_k.weight", "attention.wk.weight"),
        ("v", "self_attn.v_proj.weight", "attn_v.weight", "attention.wv.weight"),
        ("q_bias", "self_attn.q_proj.bias", "attn_q.bias", ""),
        ("k_bias", "self_attn.k_proj.bias", "attn_k.bias", ""),
        ("v_bias", "self_attn.v_proj.bias", "attn_v.bias", ""),
        ("out_bias", "self_attn.o_proj.bias", "attn_output.bias", ""),
        ("query_norm", "self_attn.q_norm.weight", "attn_q_norm.weight", ""),
        ("key_norm", "self_attn.k_norm.weight", "attn_k_norm.weight", ""),
        ("out", "self_attn.o_proj.weight", "attn_output.weight", "attention.wo.weight"),
        ("attention_post_norm", "post_attention_layernorm.weight", "post_attention_norm.weight", ""),
        ("ffn_norm", "post_attention_layernorm.weight", "ffn_norm.weight", "ffn_norm.weight"),
        ("ffn_post_norm", "post_feedforward_layernorm.weight", "post_ffw_norm.weight", ""),
        ("gate", "mlp.gate_proj.weight", "ffn_gate.weight", "feed_forward.w1.weight"),
        ("up", "mlp.up_proj.weight", "ffn_up.weight", "feed_forward.w3.weight"),
        ("down", "mlp.down_proj.weight", "ffn_down.weight", "feed_forward.w2.weight"),
        ("gate_bias", "mlp.gate_proj.bias", "ffn_gate.bias", ""),
        ("up_bias", "mlp.up_proj.bias", "ffn_up.bias", ""),
        ("down_bias", "mlp.down_proj.bias", "ffn_down.bias", ""),
        ("router", "block_sparse_moe.gate.weight", "ffn_gate_inp.weight", ""),
        ("expert_gate", "block_sparse_moe.experts.w1.weight", "ffn_gate_exps.weight", ""),
        ("expert_up", "block_sparse_moe.experts.w3.weight", "ffn_up_exps.weight", ""),
        ("expert_down", "block_sparse_moe.experts.w2.weight", "ffn_down_exps.weight", ""),
        ("shared_gate", "feed_forward.shared_expert.gate_proj.weight", "ffn_gate_shexp.weight", ""),
        ("shared_up", "feed_forward.shared_expert.up_proj.weight", "ffn_up_shexp.weight", ""),
        ("shared_down", "feed_forward.shared_expert.down_proj.weight", "ffn_down_shexp.weight", ""),
    )
}


# By path and axes of the parameter: a feed-forward and its experts have the same path in the tree. First those that are one
# tensor of the same shape. In Mixtral's files each expert is a separate tensor, "experts.3.w1"; `huggingface` joins and
# splits them, and transposes those of Llama 4.
WHOLE_TENSORS = {
    ("embedding", "V D"): "embedding",
    ("blocks.attention_norm", "D"): "attention_norm",
    ("blocks.attention.query_norm", "H"): "query_norm",
    ("blocks.attention.key_norm", "H"): "key_norm",
    ("blocks.attention_post_norm", "D"): "attention_post_norm",
    ("blocks.attention.out", "D N*H"): "out",
    ("blocks.attention.out_bias", "D"): "out_bias",
    ("blocks.ffn_norm", "D"): "ffn_norm",
    ("blocks.ffn_post_norm", "D"): "ffn_post_norm",
    ("blocks.feed_forward.gate", "F D"): "gate",
    ("blocks.feed_forward.up", "F D"): "up",
    ("blocks.feed_forward.down", "D F"): "down",
    ("blocks.feed_forward.gate_bias", "F"): "gate_bias",
    ("blocks.feed_forward.up_bias", "F"): "up_bias",
    ("blocks.feed_forward.down_bias", "D"): "down_bias",
    ("blocks.feed_forward.router", "E D"): "router",
    ("blocks.feed_forward.gate", "E F D"): "expert_gate",
    ("blocks.feed_forward.up", "E F D"): "expert_up",
    ("blocks.feed_forward.down", "E D F"): "expert_down",
    ("blocks.feed_forward.shared_gate", "F D"): "shared_gate",
    ("blocks.feed_forward.shared_up", "F D"): "shared_up",
    ("blocks.feed_forward.shared_down", "D F"): "shared_down",
    ("final_norm", "D"): "final_norm",
    ("lm_head", "V D"): "lm_head",
}
TENSOR_PARTS = {spec: (TensorPart(name, spec[1]),) for spec, name in WHOLE_TENSORS.items()} | {
    ("blocks.attention.qkv", "K G+2 H D"): (
        TensorPart("q", "N*H D", width="G", rotary=True),
        TensorPart("k", "K*H D", width="1", rotary=True),
        TensorPart("v", "K*H D", width="1"),
    ),
    ("blocks.attention.qkv_bias", "K G+2 H"): (
        TensorPart("q_bias", "N*H", width="G", rotary=True),
        TensorPart("k_bias", "K*H", width="1", rotary=True),
        TensorPart("v_bias", "K*H", width="1"),
    ),
    ("blocks.attention.query_norm", "K G H"): (TensorPart("query_norm", "N*H"),),
    ("blocks.attention.key_norm", "K 1 H"): (TensorPart("key_norm", "K*H"),),
}


def parts_of(spec: ParamSpec) -> tuple[TensorPart, ...]:
    """The tensors that make up a parameter."""
    return TENSOR_PARTS[spec.path, spec.axes]


def parts_with_columns(spec: ParamSpec, config: LlamaConfig) -> Iterator[tuple[TensorPart, slice | None]]:
    """The tensors that make up a parameter, each with its slice of the second axis; None if it is the whole parameter."""
    first = 0
    for part in parts_of(spec):
        last = first + (shape_of(part.width, config)[0] if part.width else 0)
        yield part, slice(first, last) if part.width else None
        first = last


MTP = "tensors of layers that predict several tokens (MTP)"
# What tensors are that files have besides the parameters, and their names in all formats. They do not change what is
# computed: the configuration implies them, the cache and activations are not quantized, or another model uses them.
IGNORED_TENSORS = {
    reason: re.compile(pattern)
    for reason, pattern in {
        "frequencies of RoPE": r"(.*\.)?rotary_emb(_local)?\.\w+|(.*\.)?rope\.freqs|blk\.\d+\.attn_rot_embd\.weight",
        "attention masks": r"(.*\.)?(self_attn|attn|attention)\.(bias|masked_bias|mask)",
        "empty caches": r"layers\.\d+\.attention\.cache_[kv]",
        "scales of a quantized cache": r".*\.((q|k|v|kv|prob)_scale|[qkv]_zero_point|output_scale|output_zero_point)",
        "scales of quantized activations": r".*\.(input_scale|input_zero_point|activation_scale)",
        MTP: r"(.*\.)?mtp(_\w+)?\..*",
        "tensors for images": r"(.*\.)?(vision_tower|vision_model|multi_modal_projector)\..*",
        "states of Transformer Engine": r".*\._extra_state(/.*)?",
        "vocabularies": r"tokenizer\..*|spiece_model|tekken_model",
    }.items()
}
# A tensor that marks its whole layer as one of MTP, which follows those of the model (DeepSeek-V3).
MTP_LAYER = re.compile(r"(.*\blayers\.\d+\.|blk\.\d+\.)(?:nextn|eh_proj|enorm|hnorm|shared_head)\.")


def ignored_tensors(names: Iterable[str]) -> dict[str, str]:
    """The names of tensors that no model uses, and what they are."""
    names = list(names)
    mtp_layers = tuple({match[1] for name in names if (match := MTP_LAYER.match(name))})
    reasons = {
        name: next((reason for reason, pattern in IGNORED_TENSORS.items() if pattern.fullmatch(name)), None)
        or (MTP if name.startswith(mtp_layers) else None)
        for name in names
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


def describe_ignored(ignored: Mapping[str, str]) -> tuple[str, ...]:
    """A line that counts ignored names by what they are; none if there are no names."""
    names = {reason: [name for name in ignored if ignored[name] == reason] for reason in dict.fromkeys(ignored.values())}
    counts = [f"{reason} ({len(group)}, such as {short_repr(min(group), 80)})" for reason, group in names.items()]
    return (f"ignored {', '.join(counts)}",) if counts else ()
