"""The tensors of a checkpoint that make up each parameter, and their names in every format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llama_jax.model.params import TABLE, Row

Format = Literal["huggingface", "gguf", "meta", "llama2c"]


@dataclass(frozen=True)
class Share:
    """A tensor of a checkpoint that is a parameter, or a share of one.

    Attributes:
      name: its name in the formats' modules.
      axes: of the tensor, as formats store it: rows are outputs.
      huggingface, gguf, meta, llama2c: its name in each format, "{}" standing for the layer; None where the format has no
        such tensor. (llama2.c's files name nothing: these are the names in its run.c.)
      width: its part of the parameter's second axis; "" if it is the whole parameter.
      rotary: whether the rows of each head are in the order of the rotary layout, which differs between formats.
      cut: the axis along which the ranks of Meta's releases divide it; None if each has the whole.
    """

    name: str
    axes: str
    huggingface: str | None = None
    gguf: str | None = None
    meta: str | None = None
    llama2c: str | None = None
    width: str = ""
    rotary: bool = False
    cut: int | None = None

    def name_in(self, format: Format) -> str | None:
        """Its name in a format."""
        return getattr(self, format)


# By path and axes of the row: a feed-forward and its experts have the same place in the tree. In files of Mixtral
# each expert is a tensor of its own, "experts.3.w1"; `huggingface` joins and parts them, and transposes those of Llama 4.
SHARES: dict[tuple[str, str], tuple[Share, ...]] = {
    ("embedding", "V D"): (
        Share(
            "embedding",
            "V D",
            "model.embed_tokens.weight",
            "token_embd.weight",
            "tok_embeddings.weight",
            "token_embedding_table",
        ),
    ),
    ("blocks.attention_norm", "D"): (
        Share(
            "attention_norm",
            "D",
            "model.layers.{}.input_layernorm.weight",
            "blk.{}.attn_norm.weight",
            "layers.{}.attention_norm.weight",
            "rms_att_weight.{}",
        ),
    ),
    ("blocks.attention.qkv", "K G+2 H D"): (
        Share(
            "q",
            "N*H D",
            "model.layers.{}.self_attn.q_proj.weight",
            "blk.{}.attn_q.weight",
            "layers.{}.attention.wq.weight",
            "wq.{}",
            width="G",
            rotary=True,
            cut=0,
        ),
        Share(
            "k",
            "K*H D",
            "model.layers.{}.self_attn.k_proj.weight",
            "blk.{}.attn_k.weight",
            "layers.{}.attention.wk.weight",
            "wk.{}",
            width="1",
            rotary=True,
            cut=0,
        ),
        Share(
            "v",
            "K*H D",
            "model.layers.{}.self_attn.v_proj.weight",
            "blk.{}.attn_v.weight",
            "layers.{}.attention.wv.weight",
            "wv.{}",
            width="1",
            cut=0,
        ),
    ),
    ("blocks.attention.qkv_bias", "K G+2 H"): (
        Share("q_bias", "N*H", "model.layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias", width="G", rotary=True),
        Share("k_bias", "K*H", "model.layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias", width="1", rotary=True),
        Share("v_bias", "K*H", "model.layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias", width="1"),
    ),
    ("blocks.attention.query_norm", "H"): (
        Share("query_norm", "H", "model.layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight"),
    ),
    ("blocks.attention.key_norm", "H"): (
        Share("key_norm", "H", "model.layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight"),
    ),
    ("blocks.attention.query_norm", "K G H"): (
        Share("query_norm", "N*H", "model.layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight"),
    ),
    ("blocks.attention.key_norm", "K 1 H"): (
        Share("key_norm", "K*H", "model.layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight"),
    ),
    # With a norm before and after each sublayer Hugging Face calls the one before the feed-forward otherwise, see
    # `huggingface.names_of`.
    ("blocks.attention_post_norm", "D"): (
        Share(
            "attention_post_norm",
            "D",
            "model.layers.{}.post_attention_layernorm.weight",
            "blk.{}.post_attention_norm.weight",
        ),
    ),
    ("blocks.ffn_post_norm", "D"): (
        Share("ffn_post_norm", "D", "model.layers.{}.post_feedforward_layernorm.weight", "blk.{}.post_ffw_norm.weight"),
    ),
    ("blocks.attention.out", "D N*H"): (
        Share(
            "out",
            "D N*H",
            "model.layers.{}.self_attn.o_proj.weight",
            "blk.{}.attn_output.weight",
            "layers.{}.attention.wo.weight",
            "wo.{}",
            cut=1,
        ),
    ),
    ("blocks.ffn_norm", "D"): (
        Share(
            "ffn_norm",
            "D",
            "model.layers.{}.post_attention_layernorm.weight",
            "blk.{}.ffn_norm.weight",
            "layers.{}.ffn_norm.weight",
            "rms_ffn_weight.{}",
        ),
    ),
    ("blocks.feed_forward.gate", "F D"): (
        Share(
            "gate",
            "F D",
            "model.layers.{}.mlp.gate_proj.weight",
            "blk.{}.ffn_gate.weight",
            "layers.{}.feed_forward.w1.weight",
            "w1.{}",
            cut=0,
        ),
    ),
    ("blocks.feed_forward.up", "F D"): (
        Share(
            "up",
            "F D",
            "model.layers.{}.mlp.up_proj.weight",
            "blk.{}.ffn_up.weight",
            "layers.{}.feed_forward.w3.weight",
            "w3.{}",
            cut=0,
        ),
    ),
    ("blocks.feed_forward.down", "D F"): (
        Share(
            "down",
            "D F",
            "model.layers.{}.mlp.down_proj.weight",
            "blk.{}.ffn_down.weight",
            "layers.{}.feed_forward.w2.weight",
            "w2.{}",
            cut=1,
        ),
    ),
    ("blocks.feed_forward.router", "E D"): (
        Share("router", "E D", "model.layers.{}.block_sparse_moe.gate.weight", "blk.{}.ffn_gate_inp.weight"),
    ),
    ("blocks.feed_forward.gate", "E F D"): (
        Share("expert_gate", "E F D", "model.layers.{}.block_sparse_moe.experts.w1.weight", "blk.{}.ffn_gate_exps.weight"),
    ),
    ("blocks.feed_forward.up", "E F D"): (
        Share("expert_up", "E F D", "model.layers.{}.block_sparse_moe.experts.w3.weight", "blk.{}.ffn_up_exps.weight"),
    ),
    ("blocks.feed_forward.down", "E D F"): (
        Share("expert_down", "E D F", "model.layers.{}.block_sparse_moe.experts.w2.weight", "blk.{}.ffn_down_exps.weight"),
    ),
    ("blocks.feed_forward.shared_gate", "F D"): (
        Share(
            "shared_gate",
            "F D",
            "model.layers.{}.feed_forward.shared_expert.gate_proj.weight",
            "blk.{}.ffn_gate_shexp.weight",
        ),
    ),
    ("blocks.feed_forward.shared_up", "F D"): (
        Share("shared_up", "F D", "model.layers.{}.feed_forward.shared_expert.up_proj.weight", "blk.{}.ffn_up_shexp.weight"),
    ),
    ("blocks.feed_forward.shared_down", "D F"): (
        Share(
            "shared_down",
            "D F",
            "model.layers.{}.feed_forward.shared_expert.down_proj.weight",
            "blk.{}.ffn_down_shexp.weight",
        ),
    ),
    ("final_norm", "D"): (
        Share("final_norm", "D", "model.norm.weight", "output_norm.weight", "norm.weight", "rms_final_weight"),
    ),
    ("lm_head", "V D"): (Share("lm_head", "V D", "lm_head.weight", "output.weight", "output.weight", "wcls", cut=0),),
}


def shares_of(row: Row) -> tuple[Share, ...]:
    """The tensors that make up a parameter."""
    return SHARES[row.path, row.axes]


def names(format: Format) -> dict[str, str]:
    """The name of each tensor in a format, by its name here, "{}" standing for the layer."""
    found = {share.name: share.name_in(format) for row in TABLE for share in shares_of(row)}
    return {name: there for name, there in found.items() if there is not None}
