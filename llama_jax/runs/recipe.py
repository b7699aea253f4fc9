"""The recipe of a run: all settings that determine its results, besides the data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_type_hints

from llama_jax.config import LlamaConfig, Parts
from llama_jax.config.parts import function_name
from llama_jax.data import ChatReading, DocumentFormat
from llama_jax.data.chat_tokens import check_time
from llama_jax.errors import TrainingError
from llama_jax.model.checks import check_parts
from llama_jax.model.forward_options import ComputeOptions, Remat
from llama_jax.model.lora import Lora, adapter_shapes
from llama_jax.ops.attention import AttentionBackend
from llama_jax.ops.weights.formats import FrozenFormatName
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.runs.overrides import dataclass_of
from llama_jax.settings import (
    BelowOne,
    Bounds,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    at_least,
    check_fields,
)
from llama_jax.tokenizers import Format
from llama_jax.tokenizers.chat_template import parse_template_args
from llama_jax.training.distillation import DistillOptions
from llama_jax.training.exact_gradients import VIRTUAL_SHARDS, check_virtual_shards
from llama_jax.training.optimizer import OptimizerSettings, learning_rate_schedule
from llama_jax.training.policy_gradient import PolicyKind, PolicyOptions
from llama_jax.training.preference_loss import PreferenceOptions
from llama_jax.training.step import LossFn

RECIPE_FILE = "recipe.json"  # in the folder of a run
Vocabulary = Literal["given", "byte", "bpe"]
Truncated = Literal["count", "mask"]
MAX_EPOCHS = 20  # a run with more epochs warns
DEFAULT_EPOCHS = 3.0  # of a recipe that sets neither steps nor epochs: usual for fine-tuning
MIN_STEPS_PER_EPOCH = 8  # `fit_to_data` halves the batch until an epoch has as many steps
LENGTH_MULTIPLE = 16  # `fit_to_data` rounds the length up to a multiple of it
FITTED_SETTINGS = frozenset({"steps", "epochs", "batch", "length"})  # settings that `fit_to_data` changes
# Settings that may change when a run is resumed: they affect what it logs and saves, not what it computes.
BOOKKEEPING = frozenset(
    {"evaluate_every", "evaluate_tokens", "save_every", "keep_last", "keep_best", "log_every", "prompts", "sample_tokens"}
    | {"rewards.held", "rewards.samples"}
    | {"distill.teacher", "rewards.functions"}  # paths: their contents are compared by digests
    | {"chats.template_time", "rewards.template_time"}  # compared by the digests of the data
    | {"optimizer.max_warmup_steps"}  # `fit_to_data` has replaced it by `optimizer.warmup_steps`
    | {"model.max_seq_len", "model.unscaled_max_seq_len"}  # limits, which files of --weights state since later versions
)


@dataclass(frozen=True)
class RewardSettings:
    """Settings of training with rewards (GRPO): how answers are sampled and rewarded, and the loss.

    Attributes:
      functions: ``FILE.py:FUNCTION`` each, called as ``function(completions, **columns)``; see `runs.user_functions`. The
        command line's ``--reward`` adds one.
      weights: factors of the functions in their sum; empty for 1 each.
      group: group size: answers per prompt, whose rewards are compared; a step has the recipe's batch / group prompts.
      answer: maximum tokens of an answer, including its stop token; a prompt may have the recipe's length + 1 - answer.
      temperature: sampling temperature, above 0; the loss uses log-probabilities at the same temperature.
      updates: steps on the same answers (mu of Shao et al. 2024), after which new ones are sampled.
      loss, clip, clip_high, beta: see `PolicyOptions`. With beta the reference is the model without its
        adapters, or the initial weights.
      scale: whether advantages are divided by the standard deviation of their group.
      truncated: whether truncated answers are trained on like others ("count") or not ("mask", Yu et al. 2025, section 3.4);
        either way they count in their group's mean.
      format: chat format for prompts that are messages, see `tokenizers.resolve_format`.
      special: whether "<|eot_id|>" and the like are special tokens in prompts that are texts; by default they are text.
      template_time, template_args: the time that a chat template writes, and its variables, see `data.ChatReading`.
      held: number of held-out prompts to answer in an evaluation, `group` times each; 0 for all.
      samples: number of these answers to show in the log.

    Raises:
      TrainingError, ConfigError, DataError: an invalid value.
    """

    functions: tuple[str, ...] = ()
    weights: tuple[Annotated[float, Bounds()], ...] = ()
    group: Annotated[int, at_least(2)] = 8
    answer: PositiveInt = 64
    temperature: PositiveFloat = 1.0
    updates: PositiveInt = 1
    loss: PolicyKind = "dapo"
    clip: float = 0.2
    clip_high: float | None = None
    beta: float = 0.0
    scale: bool = True
    truncated: Truncated = "count"
    format: Format = "auto"
    special: bool = False
    template_time: str | None = None
    template_args: tuple[str, ...] = ()
    held: NonNegativeInt = 32
    samples: NonNegativeInt = 2

    def __post_init__(self) -> None:
        check_fields(self, TrainingError, "rewards.")
        check_time(self.template_time)
        parse_template_args(self.template_args)
        PolicyOptions(self.loss, self.clip, self.clip_high, self.beta, self.answer if self.loss == "dr_grpo" else None)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a run, apart from its data, its folder and its devices.

    Attributes:
      model: the shape of the model.
      steps: number of training steps; 0 to compute it from `epochs` and the data.
      epochs: passes over the training data, instead of `steps`; 3 if both are 0. `batch` and `length` are then upper bounds:
        rows are no longer than the longest example needs, and the batch is halved until an epoch has 8 steps.
      batch: B, rows of a step, over all devices and microbatches.
      length: T, target tokens of a row: the sequence length of the forward pass.
      accumulate: gradient accumulation: number of microbatches per step, which run one after the other to save memory.
      exact: losses, gradient norms, parameters and the optimizer's state are bit-identical on every mesh of `data` and
        `fsdp`, under pmap and in several processes, and after a resume on another of them; see docs/exactness.md. For text
        and chats, whole models, and AdamW. With `rewards`, on a single device, the log-probabilities in the loss are
        bit-identical to those of sampling.
      virtual_shards: number of shards into which an `exact` run divides a batch, on any number of devices: a power of two,
        at least the number of devices. The batch must be a multiple of `virtual_shards` times `accumulate`.
      optimizer: see `OptimizerSettings`.
      vocabulary: "given" by ``--tokenizer`` or by the weights that training begins with; "byte"; or "bpe", learned from the
        training text, with `model.vocab_size` pieces.
      lora: train adapters with these settings on a frozen model (``--weights``); checkpoints hold only the adapters. None
        trains the whole model. Add lora.rank=16 before ``--help`` to see the settings.
      quantize: with `lora`, the matrices of the frozen model are kept in fewer bits, see `model.trees.quantize` ("nf4" is
        QLoRA: Dettmers et al. 2023); "none" keeps them as their files have them, floats in `dtype`.
      seed: seed of the initial parameters and of the order of the data.
      dtype: dtype of the computation; the trained parameters are float32.
      remat: what the backward pass recomputes to save memory; see `ComputeOptions` of `model.forward_options`.
      attention: the attention backend; "auto" uses the device's kernel if possible.
      parts: your functions that replace parts of every layer, see `config.Parts`; they become the `parts` of any `model`.
      loss: your loss instead of `training.loss.total_loss`, which is used if None.
      chunk: positions per row whose logits are in memory at a time (chunked cross-entropy); None: 64 on a CPU, else 256.
      z_loss: weight of the z-loss, see `ops.cross_entropy.LogitOptions`; 1e-4 is usual.
      neftune: NEFTune's alpha, see `training.loss.LossOptions`; 0 for no noise. The noise depends only on the seed and the
        index of the batch.
      ema_decay: decay of a moving average of the parameters, which is evaluated and loaded instead of them; 0 for none.
      skip_limit: the run ends with an error after this many consecutive steps with a non-finite loss or gradients.
      reading: how documents are separated in the data.
      chats: how conversations in the data are read; loss and evaluation then count only the assistant's messages, and rows
        hold whole conversations (`data.open_chats`). None for data that are text.
      preference: the preference loss (DPO and others), for data that are preferences, which are read according to `chats`.
        Each of the B rows has two sides of T tokens, the chosen and the rejected answers of several pairs. The reference is
        the initial model.
      distill: knowledge distillation from a teacher, see `DistillOptions`.
      rewards: reinforcement learning (GRPO): the data are prompts, and the model learns from rewards of its own answers. The
        B rows are answers.
      validation: fraction of the documents that is held out for validation if there are no validation files; with few
        documents, fraction of the tokens (`data.split`).
      evaluate_every: steps between evaluations; 0 for only one, at the end.
      evaluate_tokens: evaluate whole documents up to about this many tokens; 0 for all.
      save_every: steps between checkpoints, in addition to the last one; 0 for only the last one.
      keep_last: number of the newest checkpoints to keep.
      keep_best: number of the checkpoints with the lowest validation loss to keep.
      log_every: steps between lines of the log.
      prompts: texts that the model continues at every evaluation.
      sample_tokens: maximum number of tokens of such a continuation.

    Raises:
      TrainingError, ConfigError: an invalid value.
    """

    model: LlamaConfig
    steps: NonNegativeInt = 0
    epochs: NonNegativeFloat = 0.0
    batch: PositiveInt
    length: PositiveInt
    accumulate: PositiveInt = 1
    exact: bool = False
    virtual_shards: int = VIRTUAL_SHARDS
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    vocabulary: Vocabulary = "given"
    lora: Lora | None = None
    quantize: FrozenFormatName = "none"
    seed: Annotated[int, Bounds(0, 2**32 - 1)] = 0  # `jax.random.key` leaves out the bits above
    dtype: Literal["float32", "bfloat16"] = "float32"
    remat: Remat = "none"
    attention: AttentionBackend = "auto"
    parts: Parts = Parts()
    loss: LossFn | None = None
    chunk: PositiveInt | None = None
    z_loss: NonNegativeFloat = 0.0
    neftune: NonNegativeFloat = 0.0
    ema_decay: BelowOne = 0.0
    skip_limit: PositiveInt = 10
    reading: DocumentFormat = field(default_factory=DocumentFormat)
    chats: ChatReading | None = None
    preference: PreferenceOptions | None = None
    distill: DistillOptions | None = None
    rewards: RewardSettings | None = None
    validation: float = 0.05
    evaluate_every: NonNegativeInt = 250
    evaluate_tokens: Annotated[int, Bounds(0)] = 0
    save_every: NonNegativeInt = 250
    keep_last: PositiveInt = 2
    keep_best: NonNegativeInt = 1
    log_every: PositiveInt = 10
    prompts: tuple[str, ...] = ()
    sample_tokens: PositiveInt = 64

    def __post_init__(self) -> None:
        check_fields(self, TrainingError)
        # The forward pass reads them from the model; this copy keeps them when the model is replaced.
        object.__setattr__(self, "parts", self.parts.over(self.model.parts))
        object.__setattr__(self, "model", replace(self.model, parts=self.parts))
        _ = self.parts.names, function_name("loss", self.loss)  # raises for functions without a name to store in checkpoints
        if self.lora is not None:
            if self.optimizer.name == "muon":
                raise TrainingError("optimizer.name='muon' is for whole matrices; train adapters with adamw")
            adapter_shapes(self.model, self.lora)  # raises for targets that the model does not have
        elif self.optimizer.lora_plus != 1 or self.quantize != "none":
            raise TrainingError(
                f"optimizer.lora_plus={self.optimizer.lora_plus} and quantize={self.quantize!r} are for adapters and the"
                " frozen model under them; set lora.rank, too"
            )
        check_parts(self.model, ComputeOptions(attention=self.attention, exact=self.exact and self.rewards is not None))
        if not 0 < self.validation < 1:
            raise TrainingError(
                f"validation={self.validation} leaves nothing to train or to validate on; set a share between 0 and 1, or"
                " pass separate files with --validation-data"
            )
        if self.chats is not None and self.vocabulary == "bpe":
            raise TrainingError("vocabulary='bpe' is learned from text, but the data are chats; use a tokenizer, or byte")
        if self.preference is not None and self.chats is None:
            raise TrainingError("preference needs data that are read as chats; set chats, for example chats.format=auto")
        losses = [name for name in ("loss", "preference", "distill", "rewards") if getattr(self, name) is not None]
        if len(losses) > 1:
            raise TrainingError(f"{' and '.join(losses)} exclude each other: each is a loss; omit one of them")
        for name, conflicts in (("neftune", losses), ("z_loss", set(losses) - {"loss"})):
            if getattr(self, name) and conflicts:
                raise TrainingError(
                    f"{name}={getattr(self, name)} is a part of the default loss, which {losses[0]} replaces; omit one"
                )
        if self.length > self.model.max_seq_len:
            raise TrainingError(
                f"length={self.length} is above the model's context, max_seq_len={self.model.max_seq_len}; lower it, or"
                " extend the context with model.max_seq_len and model.rope_scaling"
            )
        if self.exact_shards:
            self._check_exact()
        elif self.virtual_shards != VIRTUAL_SHARDS:
            raise TrainingError(f"virtual_shards={self.virtual_shards} is only for exact=true on text and chats; omit it")
        if self.batch % self.accumulate:
            raise TrainingError(f"batch={self.batch} must be a multiple of accumulate={self.accumulate}")
        if self.steps and self.epochs:
            raise TrainingError(f"steps={self.steps} and epochs={self.epochs} exclude each other; set steps=0, or epochs=0")
        if self.steps:
            learning_rate_schedule(self.optimizer, self.steps)

    @property
    def exact_shards(self) -> int:
        """`StepOptions.virtual_shards` of the step: 0 for none."""
        return self.virtual_shards if self.exact and self.rewards is None else 0

    def _check_exact(self) -> None:
        check_virtual_shards(self.virtual_shards)
        if self.optimizer.name == "muon":
            raise TrainingError(
                "exact=true needs adamw; a mesh would divide the sums in the matrix products of optimizer.name='muon'"
            )
        if self.lora is not None:
            raise TrainingError("exact=true trains whole models; omit lora")
        if self.batch % (self.virtual_shards * self.accumulate):
            raise TrainingError(
                f"batch={self.batch} must be a multiple of virtual_shards={self.virtual_shards} times"
                f" accumulate={self.accumulate} with exact=true"
            )


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as nested dicts of JSON values, one per dataclass."""
    settings = dataclasses.asdict(replace(recipe, parts=recipe.parts.names, loss=None))
    del settings["parts"]  # a copy of those of the model
    return settings | {"loss": function_name("loss", recipe.loss)}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The differences of two recipes from `to_dict` that change what a run computes.

    Each as text: ``optimizer.b2: 0.95 in the folder, 0.99 now``. A field that a stored recipe lacks, because it was added
    later, counts as its default: the default of a new field must compute what was computed without it.
    """
    old, new = _flatten(_with_defaults(before, Recipe)), _flatten(after)
    return [
        f"{name}: {old.get(name)!r} in the folder, {new.get(name)!r} now"
        for name in sorted(old.keys() | new.keys())
        if name not in BOOKKEEPING and old.get(name) != new.get(name)
    ]


def _with_defaults(stored: dict[str, Any], dataclass_type: Any) -> dict[str, Any]:
    """A stored recipe, or a part of one, with defaults for the fields of its dataclass that it lacks."""
    settings, types_ = dict(stored), get_type_hints(dataclass_type)
    for f in dataclasses.fields(dataclass_type):
        inner = dataclass_of(types_[f.name])
        if f.name not in settings:
            default: Any = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            if default is not dataclasses.MISSING:
                settings[f.name] = default if inner is None or default is None else dataclasses.asdict(default)
        elif inner is not None and isinstance(settings[f.name], dict):
            settings[f.name] = _with_defaults(settings[f.name], inner)
    return settings


def _flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted names: {"optimizer.b2": 0.95}."""
    if not isinstance(value, dict):
        return {name: list(value) if isinstance(value, tuple) else value}
    return {
        key: leaf for field, inner in value.items() for key, leaf in _flatten(inner, f"{name}.{field}".strip(".")).items()
    }


def fit_to_data(
    recipe: Recipe, mesh: MeshSizes, longest: int, count_rows: Callable[[int], int], group: int = 1, updates: int = 1
) -> Recipe:
    """The recipe with `steps` and `optimizer.warmup_steps` set.

    Without `steps`, they are computed from `epochs` and the data, and `length` and `batch` are reduced to what the data
    need, see `Recipe.epochs`.

    Args:
      mesh: shards the batch and the length, which remain multiples of its sizes.
      longest: number of target tokens of the longest example.
      count_rows: maps a length to the number of rows in an epoch.
      group: the batch remains a multiple of it.
      updates: number of steps on the same batch.
    """
    steps, batch, length = recipe.steps, recipe.batch, recipe.length
    if not steps:
        multiple = LENGTH_MULTIPLE * mesh.context
        length = min(length, -(-max(longest, 1) // multiple) * multiple)
        shards = recipe.exact_shards or mesh.rows  # an exact run has the same batch on every mesh
        rows, batch_multiple = count_rows(length), group * recipe.accumulate * shards
        while rows < MIN_STEPS_PER_EPOCH * batch and batch % (2 * batch_multiple) == 0:
            batch //= 2
        steps = max(1, math.ceil((recipe.epochs or DEFAULT_EPOCHS) * rows / batch)) * updates
    # Set explicitly, so that checkpoints contain it: a run resumed with more steps keeps its warm-up.
    optimizer = replace(recipe.optimizer, warmup_steps=recipe.optimizer.warmup(steps))
    return replace(recipe, steps=steps, epochs=0.0, batch=batch, length=length, optimizer=optimizer)


def data_warnings(epochs: float, rows: int, batch: float, name: str = "", unit: str = "rows") -> list[str]:
    """Warnings about data that are read too often, or that are at most half as large as a batch.

    Args:
      epochs: number of epochs of the whole run.
      rows: number of rows in an epoch.
      batch: number of these rows in a step.
      name: name of the source in a mixture.
      unit: what a row is, for the message.
    """
    data, warnings = f"the data {name}".strip(), []
    if epochs > MAX_EPOCHS:
        warnings.append(
            f"warning: {data} is read {epochs:.0f} times, so that the model memorizes it; add data, or train for fewer"
            f" epochs (steps=0 epochs={DEFAULT_EPOCHS:g})"
        )
    if 2 * rows <= batch:
        warnings.append(
            f"warning: {data} has {rows:,} {unit}, but a step reads {batch:.4g}, each {batch / rows:.3g} times; set a"
            " smaller batch, or steps=0 to fit it to the data"
        )
    return warnings
