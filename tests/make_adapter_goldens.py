"""Write PEFT's results with adapters on a small random model, for tests to compare with if PEFT is not installed.

    pip install -e ".[parity]"
    python tests/make_adapter_goldens.py

Weights and adapters are drawn from NumPy's generator and are not stored. Stored are results in float64: logits, gradients of
a loss, and the losses and adapters of twenty steps of AdamW, in which magnitudes do not decay. Transformers never computes
normalization and rotary embeddings in float64. Normalization is therefore replaced by its definition, and all tokens are at
position 0, where rotary embeddings are the identity.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from make_goldens import GOLDENS, KINDS, random_tensors, tokens, transformers_model
from safetensors.numpy import save_file

from llama_jax import LlamaConfig
from llama_jax.model.lora import Lora

CASES: dict[str, tuple[str, Lora]] = {
    "every matrix": ("gqa", Lora(rank=4, alpha=8.0)),
    "queries and values": ("tied", Lora(rank=3, alpha=5.0, targets=("q_proj", "v_proj"))),
    "rank-stabilised": ("mqa", Lora(rank=5, alpha=6.0, targets=("k_proj", "o_proj", "gate_proj", "down_proj"), rslora=True)),
    "weight-decomposed": ("gqa", Lora(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj", "up_proj"), dora=True)),
}
STEPS, RATE, DECAY = 20, 5e-3, 0.1
BETAS, EPS = (0.9, 0.95), 1e-8
MODULES = {  # outputs and inputs of the modules of a layer
    "self_attn.q_proj": lambda c: (c.n_heads * c.head_dim, c.dim),
    "self_attn.k_proj": lambda c: (c.n_kv_heads * c.head_dim, c.dim),
    "self_attn.v_proj": lambda c: (c.n_kv_heads * c.head_dim, c.dim),
    "self_attn.o_proj": lambda c: (c.dim, c.n_heads * c.head_dim),
    "mlp.gate_proj": lambda c: (c.hidden_dim, c.dim),
    "mlp.up_proj": lambda c: (c.hidden_dim, c.dim),
    "mlp.down_proj": lambda c: (c.dim, c.hidden_dim),
}


def adapter_tensors(config: LlamaConfig, lora: Lora, seed: int = 3) -> dict[str, np.ndarray]:
    """Adapters by PEFT's names, float32; both matrices are far from zero."""
    rng, found = np.random.default_rng(seed), {}
    for layer in range(config.n_layers):
        for module, shape_of in MODULES.items():
            if module.split(".")[1] not in lora.targets:
                continue
            outputs, inputs = shape_of(config)
            stem = f"base_model.model.model.layers.{layer}.{module}"
            for name, shape in (("A", (lora.rank, inputs)), ("B", (outputs, lora.rank))):
                found[f"{stem}.lora_{name}.weight"] = (0.2 * rng.standard_normal(shape)).astype(np.float32)
            if lora.dora:
                found[f"{stem}.lora_magnitude_vector"] = rng.uniform(0.5, 1.5, outputs).astype(np.float32)
    return found


def batch_of(config: LlamaConfig, step: int) -> np.ndarray:
    """The batch of a step, int32[3, 13]: the last 12 tokens of each row are predicted."""
    return np.random.default_rng(100 + step).integers(0, config.vocab_size, (3, 13), dtype=np.int32)


def write_adapter(folder: Path, config: LlamaConfig, lora: Lora) -> None:
    """Write the adapter as PEFT would."""
    settings = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": lora.targets, "use_rslora": lora.rslora}
    settings["use_dora"] = lora.dora
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))
    save_file(adapter_tensors(config, lora), folder / "adapter_model.safetensors")


def peft_model(config: LlamaConfig, lora: Lora, tensors: dict[str, np.ndarray], *, wide: bool = True) -> Any:
    """The base model and its adapter in PEFT, in training mode; with `wide` in float64, see the module."""
    import peft
    import torch

    settings = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(transformers_model(config, random_tensors(config)), settings)
    said = peft.set_peft_model_state_dict(model, {name: torch.from_numpy(array) for name, array in tensors.items()})
    assert not said.unexpected_keys
    if wide:
        model = model.double()
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                module.forward = _normalize(module)
    return model.train()


def _normalize(module: Any) -> Any:
    import torch

    def forward(x: Any) -> Any:
        return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))

    return forward


def peft_logits(model: Any, ids: np.ndarray, *, wide: bool = True) -> Any:
    """Logits of whole rows; with `wide` every token is at position 0."""
    import torch

    rows = torch.from_numpy(ids).long()
    if not wide:
        return model(input_ids=rows).logits
    return model(input_ids=rows, attention_mask=torch.ones_like(rows), position_ids=torch.zeros_like(rows)).logits


def peft_loss(model: Any, ids: np.ndarray, *, wide: bool = True) -> Any:
    """Mean loss over all predicted tokens, in nats."""
    import torch

    logits = peft_logits(model, ids[:, :-1], wide=wide)
    targets = torch.from_numpy(ids[:, 1:]).long().reshape(-1)
    return torch.nn.functional.cross_entropy(logits.reshape(len(targets), -1), targets)


def parameters_of(model: Any) -> dict[str, Any]:
    """The trained parameters, by the names in PEFT's files."""
    named = ((name.replace(".default.", "."), p) for name, p in model.named_parameters() if p.requires_grad)
    return {name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector"): p for name, p in named}


def results(config: LlamaConfig, lora: Lora, *, wide: bool = True) -> dict[str, np.ndarray]:
    """Logits, gradients, and the results of twenty steps."""
    import torch

    model = peft_model(config, lora, adapter_tensors(config, lora), wide=wide)
    with torch.no_grad():
        found = {"logits": peft_logits(model, tokens(config)[:, :24], wide=wide).numpy()}
    peft_loss(model, batch_of(config, 0), wide=wide).backward()
    found |= {f"gradient {name}": p.grad.numpy().copy() for name, p in parameters_of(model).items()}
    named = parameters_of(model)
    magnitudes = [p for name, p in named.items() if name.endswith("magnitude_vector")]
    matrices = [p for name, p in named.items() if not name.endswith("magnitude_vector")]
    groups = [{"params": matrices}, {"params": magnitudes, "weight_decay": 0.0}]  # magnitudes do not decay here
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS, weight_decay=DECAY)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = peft_loss(model, batch_of(config, step), wide=wide)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found |= {f"after {name}": p.detach().numpy() for name, p in parameters_of(model).items()}
    return found | {"losses": np.array(losses)}


def main() -> None:
    import peft
    import torch
    import transformers

    stored = {
        f"{case}: {name}": array
        for case, (kind, lora) in CASES.items()
        for name, array in results(KINDS[kind], lora).items()
    }
    version = f"peft {peft.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    np.savez_compressed(GOLDENS / "adapters.npz", version=np.array(version), **stored)
    print(f"adapters.npz: {(GOLDENS / 'adapters.npz').stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
