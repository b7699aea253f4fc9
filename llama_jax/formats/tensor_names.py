"""The tensors of a checkpoint that make up each parameter. Each format has their names in a table `NAMES` of its own."""

from __future__ import annotations

from dataclasses import dataclass

from llama_jax.model.params import ParamSpec


@dataclass(frozen=True)
class Share:
    """A tensor of a checkpoint that is a parameter, or a share of one.

    Attributes:
      name: the key of its name in the formats' tables.
      axes: of the tensor, as formats store it: rows are outputs.
      width: its part of the parameter's second axis; "" if it is the whole parameter.
      rotary: whether the rows of each head are in the order of the rotary layout, which differs between formats.
    """

    name: str
    axes: str
    width: str = ""
    rotary: bool = False


# By path and axes of the parameter: a feed-forward and its experts have the same place in the tree. First those that are one
# tensor of the same shape. In files of Mixtral each expert is a tensor of its own, "experts.3.w1"; `huggingface` joins and
# splits them, and transposes those of Llama 4.
WHOLE_TENSORS = {
    ("embedding", "V D"): "embedding",
    ("blocks.attention_norm", "D"): "attention_norm",
    ("blocks.attention.query_norm", "H"): "query_norm",
    ("blocks.attention.key_norm", "H"): "key_norm",
    ("blocks.attention_post_norm", "D"): "attention_post_norm",
    ("blocks.attention.out", "D N*H"): "out",
    ("blocks.ffn_norm", "D"): "ffn_norm",
    ("blocks.ffn_post_norm", "D"): "ffn_post_norm",
    ("blocks.feed_forward.gate", "F D"): "gate",
    ("blocks.feed_forward.up", "F D"): "up",
    ("blocks.feed_forward.down", "D F"): "down",
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
SHARES = {row: (Share(name, row[1]),) for row, name in WHOLE_TENSORS.items()} | {
    ("blocks.attention.qkv", "K G+2 H D"): (
        Share("q", "N*H D", width="G", rotary=True),
        Share("k", "K*H D", width="1", rotary=True),
        Share("v", "K*H D", width="1"),
    ),
    ("blocks.attention.qkv_bias", "K G+2 H"): (
        Share("q_bias", "N*H", width="G", rotary=True),
        Share("k_bias", "K*H", width="1", rotary=True),
        Share("v_bias", "K*H", width="1"),
    ),
    ("blocks.attention.query_norm", "K G H"): (Share("query_norm", "N*H"),),
    ("blocks.attention.key_norm", "K 1 H"): (Share("key_norm", "K*H"),),
}


def shares_of(row: ParamSpec) -> tuple[Share, ...]:
    """The tensors that make up a parameter."""
    return SHARES[row.path, row.axes]


def with_layers(outside: dict[str, str], prefix: str, inside: dict[str, str]) -> dict[str, str]:
    """A table of names: those outside of layers, and those inside, which begin with `prefix`, where "{}" is the layer."""
    return outside | {name: prefix + rest for name, rest in inside.items()}
