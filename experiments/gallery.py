"""The pictures of docs/gallery.md, extracted from the committed notebooks.

python experiments/gallery.py
"""

from __future__ import annotations

import base64
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "gallery"
# For each picture: the notebook, and a part of the code that draws it.
PICTURES = {
    "heads": ("01_forward_pass", "fig.suptitle(f"),
    "causality": ("01_forward_pass", "Influence of s on t"),
    "recompute": ("02_kv_cache", "One more token, Llama 2 7B"),
    "pages": ("02_kv_cache", "Which request has each page"),
    "packed": ("03_training", "which keys a query sees"),
    "surprise": ("03_training", "starts = [min("),
    "mesh": ("04_sharding", "devices_indices_map"),
    "strategies": ("04_sharding", "GB that a device sends"),
    "context": ("05_long_context", "What a longer context costs"),
    "zigzag": ("05_long_context", "scores of each device"),
    "kept": ("06_quantization", "the beginning of a row"),
    "divergence": ("06_quantization", "Divergence from float32"),
    "finetuning": ("07_finetuning", "GRPO: mean reward"),
    "near": ("08_data", "Edited stories and their originals"),
    "mixture": ("08_data", "Smallest and largest share"),
    "sources": ("08_data", "Validation loss of each source"),
    "sensitivity": ("09_derivatives", "Sensitivity of the word at the end"),
    "influence": ("09_derivatives", "Left out of training"),
    "relaxed": ("09_derivatives", "Where it is written"),
    "sharpness": ("09_derivatives", "Largest Hessian eigenvalues"),
    "lens": ("10_logit_lens", "what each layer would predict after each token"),
    "tuned": ("10_logit_lens", "Divergence from the model's own prediction"),
    "fact": ("11_causal_tracing", "the stream after a layer"),
    "facts": ("11_causal_tracing", "the last token of the prompt"),
    "steered": ("12_steering", "Mood of the answers"),
    "chats": ("12_steering", "strength {strength:+d}"),
    "ablation": ("12_steering", "Loss without one head"),
    "induction": ("13_induction_heads", '"previous token", "same token", "induction"'),
    "birth": ("13_induction_heads", "Layer 1: attention to the token to be copied"),
    "moved": ("14_what_a_lora_changed", "How far the residual stream moved"),
    "patched": ("14_what_a_lora_changed", "One layer and one token from the tuned model"),
    "sparsity": ("15_sparse_autoencoder", "the first k principal components"),
    "features": ("15_sparse_autoencoder", 'concordance({f"{concept}'),
}


def picture(notebook: str, code: str) -> bytes:
    """The PNG that a cell of a notebook drew.

    Raises:
      ValueError: the code matches no cell or several, or the cell drew no picture.
    """
    cells = json.loads((ROOT / "notebooks" / f"{notebook}.ipynb").read_text("utf-8"))["cells"]
    found = [
        output["data"]["image/png"]
        for cell in cells
        if cell["cell_type"] == "code" and code in "".join(cell["source"])
        for output in cell["outputs"]
        if "image/png" in output.get("data", {})
    ]
    if len(found) != 1:
        raise ValueError(f"{len(found)} pictures of {notebook} are drawn by {code!r}; choose code that matches one")
    return base64.b64decode("".join(found[0]))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, where in PICTURES.items():
        (FOLDER / f"{name}.png").write_bytes(picture(*where))


if __name__ == "__main__":
    main()
