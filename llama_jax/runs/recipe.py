"""The recipe of a run: everything that determines its numbers."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_type_hints

from llama_jax.config import LlamaConfig, Parts
from llama_jax.config.parts import name_of
from llama_jax.config.validation import require_number
from llama_jax.data import ChatReading, DocumentFormat
from llama_jax.errors import TrainingError, shown
from llama_jax.model.checks import check_parts
from llama_jax.model.forward_options import Compute, Remat
from llama_jax.model.lora import Lora, adapter_shapes
from llama_jax.ops.attention import AttentionBackend
from llama_jax.ops.weights.formats import FrozenFormatName
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.runs.overrides import dataclass_of
from llama_jax.settings import Bounds, at_least, check_bounds
from llama_jax.tokenizers import Format
from llama_jax.training.distillation import DistillOptions
from llama_jax.training.exact_gradients import VIRTUAL_SHARDS, check_virtual_shards
from llama_jax.training.loss import LOSS_CHUNK
from llama_jax.training.optimizer import OptimizerSettings, learning_rates
from llama_jax.training.policy_gradient import PolicyKind, PolicyOptions
from llama_jax.training.preference_loss import PreferenceOptions
from llama_jax.training.step import Loss

RECIPE = "recipe.json"  # in the folder of a run
Vocabulary = Literal["given", "byte", "bpe"]
Truncated = Literal["count", "mask"]
Positive = Annotated[int, at_least(1)]
NotNegative = Annotated[int, at_least(0)]
Finite = Annotated[float, Bounds(0, sys.float_info.max)]
MAX_EPOCHS = 20  # above which a run warns
EPOCHS = 3.0  # the usual number of passes in fine-tuning, where a recipe names neither steps nor epochs
STEPS_PER_EPOCH = 8  # at least; else few examples would give a handful of updates
LENGTH_MULTIPLE = 16  # of the tokens of a row
FROM_DATA = frozenset({"steps", "epochs", "batch", "length"})  # settings that `fit_to_data` changes
# Settings that may change when a run is resumed: what it prints and keeps, not what it computes.
BOOKKEEPING = frozenset(
    {"evaluate_every", "evaluate_tokens", "save_every", "keep_last", "keep_best", "log_every", "prompts", "sample_tokens"}
    | {"rewards.held", "rewards.samples"}
    | {"distill.teacher", "rewards.functions"}  # which are known by their numbers and files
    | {"optimizer.max_warmup_steps"}  # `fit_to_data` has set the warm-up by it
)


@dataclass(frozen=True)
class RewardSettings:
    """Settings of training with rewards: how answers are sampled and judged, and the loss.

    Attributes:
      functions: ``FILE.py:FUNCTION`` each, called as ``function(completions, **columns)``; see `runs.user_functions`. The
        command line's ``--reward`` adds one.
      weights: factors of the functions in their sum; empty for 1 each.
      group: answers per prompt, which are compared; a step has the recipe's batch / group prompts.
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
      held: number of held-out prompts to answer at an evaluation, `group` times each; 0 is all.
      samples: number of these answers to show in the log.

    Raises:
      TrainingError, ConfigError: an invalid value.
    """

    functions: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    group: Annotated[int, at_least(2)] = 8
    answer: Positive = 64
    temperature: float = 1.0
    updates: Positive = 1
    loss: PolicyKind = "dapo"
    clip: float = 0.2
    clip_high: float | None = None
    beta: float = 0.0
    scale: bool = True
    truncated: Truncated = "count"
    format: Format = "auto"
    special: bool = False
    held: NotNegative = 32
    samples: NotNegative = 2

    def __post_init__(self) -> None:
        check_bounds(self, TrainingError, "rewards.")
        require_number("rewards.temperature", self.temperature, above=0)
        for weight in self.weights:
            require_number("rewards.weights", weight)
        PolicyOptions(self.loss, self.clip, self.clip_high, self.beta, self.answer if self.loss == "dr_grpo" else None)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a run, apart from its data, its folder and its devices.

    Attributes:
      model: the shape of the model.
      steps: updates of the parameters; with 0 they follow from `epochs` and the data.
      epochs: passes over the training data, instead of `steps`; 3 if both are 0. `batch` and `length` are then upper bounds:
        rows are no longer than the longest example needs, and the batch is halved until an epoch has 8 steps.
      batch: B, rows of a step, over all devices and parts.
      length: T, predicted tokens of a row.
      accumulate: parts of a batch whose gradients are computed one after the other and added up, which saves memory.
      exact: losses, gradient norms, parameters and the optimizer's state have the same bits on every mesh of `data` and
        `fsdp`, under pmap and in several processes, and after a resume on another of them; see docs/exactness.md. For text
        and chats, whole models, and AdamW. With `rewards`, on a single device, the log-probabilities of a step have the bits
        of those with which the answers were sampled.
      virtual_shards: parts into which an `exact` run divides a batch, on any number of devices: a power of two, and at least
        the number of devices. The batch is a multiple of `virtual_shards` times `accumulate`.
      optimizer: see `OptimizerSettings`.
      vocabulary: "given" by ``--tokenizer`` or by the weights that training begins with; "byte"; or "bpe", learned from the
        training text, with `model.vocab_size` pieces.
      lora: train adapters with these settings on a frozen model (``--weights``); checkpoints hold only the adapters. None
        trains the whole model.
      quantize: with `lora`, the matrices of the frozen model are kept in fewer bits, see `model.trees.quantize` ("nf4" is
        QLoRA: Dettmers et al. 2023); "none" keeps them as their files have them, floats in `dtype`.
      seed: seed of the initial parameters and of the order of the data.
      dtype: type of the computation; the trained parameters are float32.
      remat: what the backward pass recomputes to save memory; see `Compute` of `model.forward_options`.
      attention: the implementation of attention; "auto" uses the device's kernel if possible.
      parts: your functions that replace parts of every layer, see `config.Parts`; they become the `parts` of any `model`.
      loss: your loss instead of `training.loss.total_loss`, which is used if None.
      chunk: positions of each row whose logits are computed at once.
      z_loss: weight of the squared logarithm of the softmax's denominator, see `ops.LogitOptions`; 1e-4 is usual.
      neftune: scale of the noise that is added to the embeddings, see `training.loss`; 0 adds none. The noise depends
        on the seed and the number of the batch.
      ema_decay: decay of a moving average of the parameters, which is evaluated and loaded instead of them; 0 for none.
      skip_limit: consecutive steps without finite gradients after which the run ends with an error.
      reading: where documents end in the data.
      chats: how conversations in the data are read; loss and evaluation then count only the assistant's messages, and rows
        hold whole conversations (`data.open_chats`). None for data that are text.
      preference: the loss for data that are preferences, which are read according to `chats`. Each of the B rows has two
        sides of T tokens, the chosen and the rejected answers of several pairs. The reference is the initial model.
      distill: learn the predictions of a teacher, see `DistillOptions`.
      rewards: the data are prompts, and the model learns from its own answers by their rewards. The B rows are answers.
      validation: share of the documents that is held out for validation if there are no validation files; with few
        documents, share of the tokens (`data.split`).
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
    steps: NotNegative = 0
    epochs: Finite = 0.0
    batch: Positive
    length: Positive
    accumulate: Positive = 1
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
    loss: Loss | None = None
    chunk: Positive = LOSS_CHUNK
    z_loss: Finite = 0.0
    neftune: Finite = 0.0
    ema_decay: float = 0.0
    skip_limit: Positive = 10
    reading: DocumentFormat = field(default_factory=DocumentFormat)
    chats: ChatReading | None = None
    preference: PreferenceOptions | None = None
    distill: DistillOptions | None = None
    rewards: RewardSettings | None = None
    validation: float = 0.05
    evaluate_every: NotNegative = 250
    evaluate_tokens: Annotated[int, Bounds(0)] = 0
    save_every: NotNegative = 250
    keep_last: Positive = 2
    keep_best: NotNegative = 1
    log_every: Positive = 10
    prompts: tuple[str, ...] = ()
    sample_tokens: Positive = 64

    def __post_init__(self) -> None:
        check_bounds(self, TrainingError)
        if not isinstance(self.parts, Parts):
            raise TrainingError(f"parts={shown(self.parts, 80)} must be Parts, such as parts=Parts(norm=my_norm)")
        if not (self.loss is None or callable(self.loss)):
            raise TrainingError(f"loss={shown(self.loss, 80)} must be a function; set it in your own recipe function")
        # In the model, where all that computes with it finds them; and here, so that they stay when it is replaced.
        object.__setattr__(self, "parts", self.parts.over(self.model.parts))
        object.__setattr__(self, "model", replace(self.model, parts=self.parts))
        _ = self.parts.names, name_of("loss", self.loss)  # raise for functions that no checkpoint could name
        if self.lora is not None:
            if self.optimizer.name == "muon":
                raise TrainingError("optimizer.name='muon' is for whole matrices; train adapters with adamw")
            adapter_shapes(self.model, self.lora)  # raises for targets that the model does not have
        elif self.optimizer.lora_plus != 1:
            raise TrainingError(f"optimizer.lora_plus={self.optimizer.lora_plus} is for adapters; set lora.rank, too")
        elif self.quantize != "none":
            raise TrainingError(f"quantize={self.quantize!r} is for the frozen model under adapters; set lora.rank, too")
        check_parts(self.model, Compute(attention=self.attention, exact=self.exact and self.rewards is not None))
        if not 0 <= self.ema_decay < 1:
            raise TrainingError(f"ema_decay={self.ema_decay} must be at least 0 and below 1")
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
        for name, others in (("neftune", losses), ("z_loss", set(losses) - {"loss"})):
            if getattr(self, name) and others:
                raise TrainingError(
                    f"{name}={getattr(self, name)} is a part of the default loss, which {losses[0]} replaces; omit one"
                )
        if self.length > self.model.max_seq_len:
            raise TrainingError(f"length={self.length} is above the model's context, max_seq_len={self.model.max_seq_len}")
        if self.exact_shards:
            self._check_exact()
        elif self.virtual_shards != VIRTUAL_SHARDS:
            raise TrainingError(f"virtual_shards={self.virtual_shards} is only for exact=true on text and chats; omit it")
        if self.batch % self.accumulate:
            raise TrainingError(f"batch={self.batch} must be a multiple of accumulate={self.accumulate}")
        if self.steps and self.epochs:
            raise TrainingError(f"steps={self.steps} and epochs={self.epochs} exclude each other; set steps=0, or epochs=0")
        if self.steps:
            learning_rates(self.optimizer, self.steps)

    @property
    def exact_shards(self) -> int:
        """The virtual shards of a step, 0 for none."""
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
    """The recipe as JSON holds it, nested as its dataclasses are."""
    found = dataclasses.asdict(replace(recipe, parts=recipe.parts.names, loss=None))
    del found["parts"]  # are those of the model
    return found | {"loss": name_of("loss", recipe.loss)}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The differences of two recipes from `to_dict` that change numbers: ``optimizer.b2: 0.95 in the folder, 0.99 now``.

    A field that a stored recipe lacks has its default, which therefore computes what was computed without the field.
    """
    old, new = _flat(_completed(before, Recipe)), _flat(after)
    return [
        f"{name}: {old.get(name)!r} in the folder, {new.get(name)!r} now"
        for name in sorted(old.keys() | new.keys())
        if name not in BOOKKEEPING and old.get(name) != new.get(name)
    ]


def _completed(written: dict[str, Any], kind: Any) -> dict[str, Any]:
    """A recipe, or a part of one, with defaults for the fields of its dataclass that it lacks."""
    found, types_ = dict(written), get_type_hints(kind)
    for f in dataclasses.fields(kind):
        inner = dataclass_of(types_[f.name])
        if f.name not in found:
            default: Any = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            if default is not dataclasses.MISSING:
                found[f.name] = default if inner is None or default is None else dataclasses.asdict(default)
        elif inner is not None and isinstance(found[f.name], dict):
            found[f.name] = _completed(found[f.name], inner)
    return found


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: list(value) if isinstance(value, tuple) else value}
    return {key: leaf for field, inner in value.items() for key, leaf in _flat(inner, f"{name}.{field}".strip(".")).items()}


def fit_to_data(
    recipe: Recipe, mesh: MeshSizes, longest: int, rows: Callable[[int], int], group: int = 1, updates: int = 1
) -> Recipe:
    """The recipe with its steps and its warm-up, and with no longer rows and no larger a batch than the data need; those of
    a recipe with `steps` stay as they are.

    Args:
      mesh: divides the batch and the length, which remain its multiples.
      longest: predicted tokens of the longest example.
      rows: of an epoch, given their length.
      group: the batch remains a multiple of it.
      updates: steps on the same batch.
    """
    steps, batch, length = recipe.steps, recipe.batch, recipe.length
    if not steps:
        multiple = LENGTH_MULTIPLE * mesh.context
        length = min(length, -(-max(longest, 1) // multiple) * multiple)
        shards = recipe.exact_shards or mesh.rows  # an exact run has the same batch on every mesh
        count, least = rows(length), group * recipe.accumulate * shards
        while count < STEPS_PER_EPOCH * batch and batch % (2 * least) == 0:
            batch //= 2
        steps = max(1, math.ceil((recipe.epochs or EPOCHS) * count / batch)) * updates
    # Written out, so that a checkpoint tells it: a run that is prolonged keeps it.
    optimizer = replace(recipe.optimizer, warmup_steps=recipe.optimizer.warmup(steps))
    return replace(recipe, steps=steps, epochs=0.0, batch=batch, length=length, optimizer=optimizer)


def data_warnings(epochs: float, rows: int, batch: float, name: str = "", unit: str = "rows") -> list[str]:
    """Lines about data that are read too often, or that are at most half as large as a batch.

    Args:
      epochs: of the whole run.
      rows: of an epoch.
      batch: rows of them in a step.
      name: of a source of a mixture.
      unit: what the rows are.
    """
    data, found = f"the data {name}".strip(), []
    if epochs > MAX_EPOCHS:
        found.append(
            f"warning: {data} is read {epochs:.0f} times, so that the model memorizes it; add data, or train for fewer"
            f" epochs (steps=0 epochs={EPOCHS:g})"
        )
    if 2 * rows <= batch:
        found.append(
            f"warning: {data} has {rows:,} {unit}, but a step reads {batch:.4g}, each {batch / rows:.3g} times; set a"
            " smaller batch, or steps=0 to fit it to the data"
        )
    return found
