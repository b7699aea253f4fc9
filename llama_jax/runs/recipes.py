"""The built-in recipes: functions without arguments that return a `Recipe`, as a file of your own may contain."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llama_jax.config import LlamaConfig
from llama_jax.config.presets import preset
from llama_jax.data import ChatReading, DocumentFormat
from llama_jax.errors import TrainingError
from llama_jax.runs.recipe import Recipe, RewardSettings
from llama_jax.runs.user_functions import call_function
from llama_jax.tokenizers.sentencepiece import BYTE_VOCABULARY
from llama_jax.training.distillation import DistillOptions
from llama_jax.training.optimizer import OptimizerSettings
from llama_jax.training.preference_loss import PreferenceOptions


def tiny() -> Recipe:
    """A vocabulary of 512 and a Llama of 260 thousand parameters, llama2.c's smallest: a minute on a laptop."""
    return Recipe(
        model=replace(preset("stories-260k"), max_seq_len=256),
        steps=300,
        batch=16,
        length=128,
        optimizer=OptimizerSettings(learning_rate=3e-3, max_warmup_steps=30),
        vocabulary="bpe",
        evaluate_every=100,
        evaluate_tokens=20_000,
        save_every=100,
        prompts=("Once upon a time",),
    )


def shakespeare() -> Recipe:
    """Shakespeare's plays byte by byte, as Karpathy's char-rnn and nanoGPT read them: minutes on a laptop."""
    return Recipe(
        model=LlamaConfig(
            vocab_size=-(-BYTE_VOCABULARY // 64) * 64,
            dim=128,
            n_layers=6,
            n_heads=4,
            n_kv_heads=4,
            hidden_dim=344,
            max_seq_len=256,
            norm_eps=1e-5,
            rope_theta=10_000.0,
            tie_embeddings=True,
        ),
        steps=1500,
        batch=8,
        length=256,
        optimizer=OptimizerSettings(learning_rate=2e-3, max_warmup_steps=100, final_share=0.0, b2=0.99),
        vocabulary="byte",
        # A single text: cut into pieces, of which every tenth is for validation.
        reading=DocumentFormat(longest=4000),
        validation=0.1,
        evaluate_every=250,
        evaluate_tokens=50_000,
        save_every=500,
        prompts=("ROMEO:\n",),
        sample_tokens=200,
    )


def stories15m() -> Recipe:
    """llama2.c's 15M model: its shape, vocabulary (``--tokenizer``: Llama 2's), batch and length of training."""
    return Recipe(
        model=preset("stories-15m"),
        steps=100_000,
        batch=512,
        length=256,
        accumulate=4,
        optimizer=OptimizerSettings(learning_rate=5e-4, max_warmup_steps=1000, final_share=0.0),
        dtype="bfloat16",
        evaluate_every=2000,
        evaluate_tokens=1_000_000,
        save_every=2000,
        prompts=("Once upon a time",),
    )


def tinyllama() -> Recipe:
    """TinyLlama 1.1B as published: batch, schedule and optimizer (Zhang et al. 2024, section 2.3)."""
    return Recipe(
        model=preset("tinyllama-1.1b"),
        steps=1_430_512,
        batch=1024,
        length=2048,
        accumulate=8,
        optimizer=OptimizerSettings(learning_rate=4e-4, max_warmup_steps=2000),
        dtype="bfloat16",
        remat="dots",
        evaluate_every=5000,
        evaluate_tokens=2_000_000,
        save_every=5000,
    )


def sft() -> Recipe:
    """Fine-tuning of all parameters on the assistant's messages in conversations, for 3 epochs. The model is that of the
    weights, and the learning rate that of TRL's SFT."""
    return Recipe(
        model=preset("stories-260k"),
        batch=16,
        length=512,
        optimizer=OptimizerSettings(learning_rate=2e-5, max_warmup_steps=20, final_share=0.0, weight_decay=0.0),
        dtype="bfloat16",
        remat="dots",
        chats=ChatReading(),
        evaluate_every=100,
        save_every=100,
    )


def dpo() -> Recipe:
    """Fine-tuning on preferences, by `preference.kind`. The model is that of the weights, beta and the learning rate are
    those of TRL's DPO; adapters take ten times that rate."""
    return replace(
        sft(),
        batch=8,
        optimizer=OptimizerSettings(learning_rate=1e-6, max_warmup_steps=20, final_share=0.0, weight_decay=0.0),
        preference=PreferenceOptions(),
    )


def distill() -> Recipe:
    """A small model with the vocabulary of a teacher (``--teacher``), or that of the weights, learns the teacher's
    predictions."""
    return Recipe(
        model=preset("stories-260k"),
        steps=2000,
        batch=16,
        length=256,
        optimizer=OptimizerSettings(learning_rate=1e-3, max_warmup_steps=50),
        distill=DistillOptions(),
        evaluate_every=200,
        evaluate_tokens=50_000,
        save_every=200,
    )


def grpo() -> Recipe:
    """Reinforcement of the model's own answers by functions that judge them (``--reward``), 8 to each of 8 prompts. The
    model is that of the weights, and the learning rate that of TRL's GRPO; adapters take ten times that rate."""
    return Recipe(
        model=preset("stories-260k"),
        steps=200,
        batch=64,
        length=256,
        optimizer=OptimizerSettings(learning_rate=1e-6, schedule="constant", max_warmup_steps=5, weight_decay=0.0),
        dtype="bfloat16",
        remat="dots",
        rewards=RewardSettings(),
        evaluate_every=50,
        save_every=50,
        log_every=1,
    )


BUILT_IN: dict[str, Callable[[], Recipe]] = {
    recipe.__name__: recipe for recipe in (tiny, shakespeare, stories15m, tinyllama, sft, dpo, distill, grpo)
}
FINE_TUNING = ("sft", "dpo", "grpo")  # they start from the model of --weights


def check_weights(name: str, *, has_weights: bool) -> None:
    """Raise TrainingError if a built-in recipe needs a model to begin with and there is none."""
    if name in FINE_TUNING and not has_weights:
        raise TrainingError(f"the recipe {name} fine-tunes a model; pass it with --weights, also when resuming")


def find(name: str) -> Recipe:
    """The recipe of that name: a built-in one, or ``FILE.py:FUNCTION``, whose file is run.

    Raises:
      TrainingError: no such recipe, or something else that the function returns.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    file, colon, _ = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise TrainingError(f"no recipe {name!r}; use {', '.join(BUILT_IN)}, or FILE.py:FUNCTION")
    recipe = call_function(name, "recipe")
    if not isinstance(recipe, Recipe):
        raise TrainingError(f"recipe {name!r} returned {type(recipe).__name__}; a llama_jax.runs.recipe.Recipe is needed")
    return recipe
