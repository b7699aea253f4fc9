"""What a model is made of: one row for each parameter.

All that must know a parameter reads it here: `init`, the partition specs, the optimizers' masks, the checks, the sizes of
`estimate`, and every format's loading and saving. A parameter that only some models have is a row with a condition; the tree
of a model without it holds None there.

Axes are spelled in the alphabet of the configuration, see `sizes`. To add a parameter: a field of the classes in `params`, a
row here, and its use in `forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec as P

from llama_jax.config import LlamaConfig

Format = Literal["huggingface", "gguf", "meta", "llama2c"]
BLOCKS = "blocks."  # begins the path of what every layer has


@dataclass(frozen=True)
class Share:
    """A tensor of a checkpoint that is a parameter, or a share of one.

    Attributes:
      name: by which the formats' modules know it.
      axes: of the tensor, as formats store it: rows are outputs.
      huggingface, gguf, meta, llama2c: its name in each format, "{}" standing for the layer; None where the format has no
        such tensor. (llama2.c's files name nothing: these are the names in its run.c.)
      width: how much of the parameter's second axis it is; "" where it is the whole parameter.
      rotary: whether the order of each head's rows is that of the rotary layout, in which formats differ.
      cut: the axis along which the ranks of Meta's releases divide it; None where each has the whole.
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


@dataclass(frozen=True)
class Row:
    """A parameter.

    Attributes:
      path: in the tree: "blocks.attention.qkv".
      axes: of one layer: "K G+2 H D".
      mesh: the mesh axes that cut each of them.
      start: how it begins: drawn with standard deviation 0.02 ("normal"); that over sqrt(2 L), for what ends in the residual
        stream ("residual"); "ones", or "zeros".
      shares: the tensors of a checkpoint that make it up.
      draw: which of a seed's random keys it is drawn with, and which of two parameters drawn together it is. While these
        stay, a seed gives the same model.
      outputs: the axes, from the last, that are the outputs of a matrix whose inputs are the last axis: what Muon
        orthogonalises. None for what it leaves to AdamW.
      when: whether a model of a configuration has it.
    """

    path: str
    axes: str
    mesh: P
    start: Literal["normal", "residual", "ones", "zeros"]
    shares: tuple[Share, ...]
    draw: tuple[int, int | None] = (0, None)
    outputs: tuple[int, ...] | None = None
    when: Callable[[LlamaConfig], bool] = lambda config: True

    @property
    def in_blocks(self) -> bool:
        """Whether every layer has one."""
        return self.path.startswith(BLOCKS)

    @property
    def decays(self) -> bool:
        """Whether weight decay is for it: for what is drawn. A norm's weight that shrinks would be made up for elsewhere."""
        return self.start in ("normal", "residual")

    @property
    def has_vocabulary(self) -> bool:
        """Whether it has a row for each token, and so may have rows of padding."""
        return self.axes.startswith("V")

    @property
    def of_expert(self) -> bool:
        """Whether each expert has one, of which a token is multiplied with a few."""
        return self.axes.startswith("E ") and len(self.axes.split()) == 3

    @property
    def has_groups(self) -> bool:
        """Whether it has an entry for each key/value head with its queries, and so may hold heads several times."""
        return self.axes.startswith("K G+2")

    @property
    def axes_after_groups(self) -> int:
        """How many axes follow those of heads and what each holds."""
        return len(self.axes.split()) - 2

    def shape(self, config: LlamaConfig) -> tuple[int, ...]:
        """Of one layer."""
        return shape_of(self.axes, config)


def _has_experts(config: LlamaConfig) -> bool:
    return bool(config.experts)


_HF = "model.layers.{}"
# In files of Mixtral each expert is a tensor of its own, "experts.3.w1"; `huggingface` joins and parts them.
TABLE: tuple[Row, ...] = (
    Row(
        "embedding",
        "V D",
        P("tensor", "fsdp"),
        "normal",
        (
            Share(
                "embedding",
                "V D",
                "model.embed_tokens.weight",
                "token_embd.weight",
                "tok_embeddings.weight",
                "token_embedding_table",
            ),
        ),
        draw=(0, None),
    ),
    Row(
        "blocks.attention_norm",
        "D",
        P(),
        "ones",
        (
            Share(
                "attention_norm",
                "D",
                "model.layers.{}.input_layernorm.weight",
                "blk.{}.attn_norm.weight",
                "layers.{}.attention_norm.weight",
                "rms_att_weight.{}",
            ),
        ),
    ),
    Row(
        "blocks.attention.qkv",
        "K G+2 H D",
        P("tensor", None, None, "fsdp"),
        "normal",
        (
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
        draw=(1, None),
        outputs=(-4, -3, -2),  # one product, one matrix
    ),
    Row(
        "blocks.attention.qkv_bias",
        "K G+2 H",
        P("tensor"),
        "zeros",
        (
            Share("q_bias", "N*H", f"{_HF}.self_attn.q_proj.bias", "blk.{}.attn_q.bias", width="G", rotary=True),
            Share("k_bias", "K*H", f"{_HF}.self_attn.k_proj.bias", "blk.{}.attn_k.bias", width="1", rotary=True),
            Share("v_bias", "K*H", f"{_HF}.self_attn.v_proj.bias", "blk.{}.attn_v.bias", width="1"),
        ),
        when=lambda config: config.qkv_bias,
    ),
    Row(
        "blocks.attention.query_norm",
        "H",
        P(),
        "ones",
        (Share("query_norm", "H", f"{_HF}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight"),),
        when=lambda config: config.qk_norm,
    ),
    Row(
        "blocks.attention.key_norm",
        "H",
        P(),
        "ones",
        (Share("key_norm", "H", f"{_HF}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight"),),
        when=lambda config: config.qk_norm,
    ),
    Row(
        "blocks.attention.out",
        "D N*H",
        P("fsdp", "tensor"),
        "residual",
        (
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
        draw=(2, None),
        outputs=(-2,),
    ),
    Row(
        "blocks.ffn_norm",
        "D",
        P(),
        "ones",
        (
            Share(
                "ffn_norm",
                "D",
                "model.layers.{}.post_attention_layernorm.weight",
                "blk.{}.ffn_norm.weight",
                "layers.{}.ffn_norm.weight",
                "rms_ffn_weight.{}",
            ),
        ),
    ),
    Row(
        "blocks.feed_forward.gate",
        "F D",
        P("tensor", "fsdp"),
        "normal",
        (
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
        draw=(3, 0),
        outputs=(-2,),
        when=lambda config: not config.experts,
    ),
    Row(
        "blocks.feed_forward.up",
        "F D",
        P("tensor", "fsdp"),
        "normal",
        (
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
        draw=(3, 1),
        outputs=(-2,),
        when=lambda config: not config.experts,
    ),
    Row(
        "blocks.feed_forward.down",
        "D F",
        P("fsdp", "tensor"),
        "residual",
        (
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
        draw=(4, None),
        outputs=(-2,),
        when=lambda config: not config.experts,
    ),
    Row(
        "blocks.feed_forward.router",
        "E D",
        P(None, "fsdp"),
        "normal",
        (Share("router", "E D", f"{_HF}.block_sparse_moe.gate.weight", "blk.{}.ffn_gate_inp.weight"),),
        draw=(6, None),
        outputs=(-2,),
        when=_has_experts,
    ),
    Row(
        "blocks.feed_forward.gate",
        "E F D",
        P(None, "tensor", "fsdp"),
        "normal",
        (Share("expert_gate", "E F D", f"{_HF}.block_sparse_moe.experts.w1.weight", "blk.{}.ffn_gate_exps.weight"),),
        draw=(3, 0),
        outputs=(-2,),
        when=_has_experts,
    ),
    Row(
        "blocks.feed_forward.up",
        "E F D",
        P(None, "tensor", "fsdp"),
        "normal",
        (Share("expert_up", "E F D", f"{_HF}.block_sparse_moe.experts.w3.weight", "blk.{}.ffn_up_exps.weight"),),
        draw=(3, 1),
        outputs=(-2,),
        when=_has_experts,
    ),
    Row(
        "blocks.feed_forward.down",
        "E D F",
        P(None, "fsdp", "tensor"),
        "residual",
        (Share("expert_down", "E D F", f"{_HF}.block_sparse_moe.experts.w2.weight", "blk.{}.ffn_down_exps.weight"),),
        draw=(4, None),
        outputs=(-2,),
        when=_has_experts,
    ),
    Row(
        "final_norm",
        "D",
        P(),
        "ones",
        (Share("final_norm", "D", "model.norm.weight", "output_norm.weight", "norm.weight", "rms_final_weight"),),
    ),
    Row(
        "lm_head",
        "V D",
        P("tensor", "fsdp"),
        "normal",
        (Share("lm_head", "V D", "lm_head.weight", "output.weight", "output.weight", "wcls", cut=0),),
        draw=(5, None),
        when=lambda config: not config.tie_embeddings,
    ),
)


@cache
def sizes(config: LlamaConfig) -> dict[str, int]:
    """What the letters of the axes, and the products of them that occur, stand for."""
    c = config
    return {
        "V": c.vocab_size,
        "D": c.dim,
        "F": c.hidden_dim,
        "E": c.experts,
        "K": c.n_kv_heads,
        "G": c.queries_per_kv_head,
        "H": c.head_dim,
        "G+2": c.queries_per_kv_head + 2,
        "N*H": c.n_heads * c.head_dim,
        "K*H": c.n_kv_heads * c.head_dim,
        "1": 1,
    }


def shape_of(axes: str, config: LlamaConfig) -> tuple[int, ...]:
    """The lengths of axes: "V D" of the stories of 260K are (512, 64)."""
    return tuple(sizes(config)[axis] for axis in axes.split())


@cache
def rows(config: LlamaConfig) -> tuple[Row, ...]:
    """The parameters that a model of this configuration has."""
    return tuple(row for row in TABLE if row.when(config))


def row_at(path: tuple[Any, ...]) -> Row:
    """The row of a leaf, of which `jax.tree_util.tree_map_with_path` gives the path in a `Llama` of either form.

    Of several rows for one place the first: they differ in shape and condition alone.
    """
    return _BY_PATH[".".join(key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey))]


def names(format: Format, table: tuple[Row, ...] = TABLE) -> dict[str, str]:
    """The name of each tensor in a format, by its name here, "{}" standing for the layer."""
    found = {share.name: share.name_in(format) for row in table for share in row.shares}
    return {name: there for name, there in found.items() if there is not None}


_BY_PATH = {row.path: row for row in reversed(TABLE)}
