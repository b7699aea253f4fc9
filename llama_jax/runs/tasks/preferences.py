"""Training on preferences: pairs of a chosen and a rejected answer, or single answers labeled good or bad."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import numpy as np

from llama_jax.data.batches import Batches
from llama_jax.data.chat_tokens import open_labeled, open_preferences
from llama_jax.data.documents import first_fields
from llama_jax.data.load_corpus import MegabyteProgress
from llama_jax.data.preference_batches import PairRows, Pairs, concatenate, mismatched_answers, split_pairs, without_pairs
from llama_jax.errors import TrainingError
from llama_jax.evaluation.measure import default_batch, token_nats
from llama_jax.evaluation.perplexity import AnswerLogprobs, pair_logprobs
from llama_jax.model.params import LlamaParams
from llama_jax.runs.log import progress_bar
from llama_jax.runs.recipe import Recipe, data_warnings, fit_to_data
from llama_jax.runs.tasks.interface import (
    EvalResult,
    FrozenModels,
    Objective,
    Task,
    TaskContext,
    TaskInputs,
    TaskType,
    compute_of,
    name_format_setting,
    name_size_setting,
)
from llama_jax.storage.atomic_write import write_atomically
from llama_jax.tokenizers import Tokenizer
from llama_jax.training.flops import step_flops
from llama_jax.training.preference_batch import (
    AnswerSums,
    PairBatch,
    pair_count,
    pair_loss,
    preferred,
    preparing,
    sums_of,
)
from llama_jax.training.preference_loss import FREE, PreferenceOptions

REFERENCE = "reference.npz"  # in the folder of a run that trains all parameters


def open_preferences_task(recipe: Recipe, inputs: TaskInputs) -> Task:
    """Preferences as a task.

    Raises:
      TrainingError: nothing to validate on, a token without a row in the model's embedding, or no chat format.
      DataError: invalid files.
    """
    options = preference_options(recipe)

    def read(paths: Sequence[Path]) -> Pairs:
        pairs, counts = open_pairs(recipe, paths, inputs.tokenizer)
        inputs.log.line(f"preferences: {counts}")
        with name_size_setting(inputs.tokenizer):
            pairs.check_rows(recipe.model.vocab_size, inputs.tokenizer)
        return pairs

    if inputs.validation_data:
        pairs, validation = read(inputs.data), read(inputs.validation_data)
        train = without_pairs(pairs, validation)
    else:
        train, validation = split_pairs(read(inputs.data), recipe.validation, seed=recipe.seed)
    digests = {"train": train.digest, "validation": validation.digest}
    longest = int(max(train.sizes.max(), validation.sizes.max())) - 1
    recipe = fit_to_data(
        recipe, inputs.mesh, longest, lambda length: len(PairRows(train, recipe.batch, length, seed=recipe.seed).members)
    )
    rows = PairRows(train, recipe.batch, recipe.length, seed=recipe.seed)
    what = "answers" if options.kind == "kto" else "pairs"
    epochs = recipe.steps * recipe.batch / len(rows.members)
    fact = (
        f"data: {train.count:,} {what} in {len(rows.members):,} rows to train, {validation.count:,} {what} to validate;"
        f" {recipe.steps:,} steps of {recipe.batch} rows x 2 x {recipe.length} are"
        f" {epochs:.1f} epochs"
    )
    sides = 1 if options.kind == "kto" else 2
    trained = step_flops(recipe.model, sides * recipe.batch, recipe.length, lora=recipe.lora)
    forward = step_flops(recipe.model, recipe.batch, recipe.length) / 3
    read_again = 2 * needs_reference(options) * (recipe.lora is not None) + (options.kind == "kto")
    return Task(
        recipe=recipe,
        objective=preference_objective(recipe, rows.most),
        digests=digests,
        facts=(fact, *data_warnings(epochs, len(rows.members), recipe.batch)),
        tokens=2 * recipe.batch * recipe.length,
        flops=trained + read_again * forward,
        begin=partial(PreferenceBatchSource, recipe, train, validation),
        logged_metrics=("accuracy", "margin"),
    )


PREFERENCES = TaskType("preferences", open_preferences_task, divides_rows=False)


def preference_options(recipe: Recipe) -> PreferenceOptions:
    """The preference settings of a recipe that has them."""
    assert recipe.preference is not None
    return recipe.preference


def needs_reference(options: PreferenceOptions) -> bool:
    """Whether the loss needs a reference model."""
    return options.kind not in FREE


def preference_objective(recipe: Recipe, most: int) -> Objective:
    """The loss for rows of at most `most` pairs."""
    options = preference_options(recipe)
    kto, adapters = options.kind == "kto", recipe.lora is not None
    has_reference = needs_reference(options)
    rows = jax.ShapeDtypeStruct((recipe.batch, 2, recipe.length + 1), np.int32)
    marks = jax.ShapeDtypeStruct((recipe.batch, most), np.bool_)
    cached = jax.ShapeDtypeStruct((recipe.batch, 2, most), np.float32) if has_reference and not adapters else None
    mask = jax.ShapeDtypeStruct(rows.shape, np.bool_)

    def make_prepare_batch(frozen: FrozenModels) -> Callable[..., PairBatch]:
        return preparing(kto, frozen.base if has_reference else None, recipe.accumulate)

    return Objective(
        batch_shapes=PairBatch(rows, rows, rows, mask, marks, marks if kto else None, cached),
        make_loss=lambda _: partial(pair_loss, options),
        count=pair_count,
        make_prepare_batch=make_prepare_batch if kto or (has_reference and adapters) else None,
    )


def open_pairs(recipe: Recipe, paths: Sequence[Path], tokenizer: Tokenizer) -> tuple[Pairs, Any]:
    """The pairs in files, or for KTO their answers with mismatched ones; and counts of the examples."""
    reading, length, kto = recipe.chats, recipe.length, preference_options(recipe).kind == "kto"
    assert reading is not None
    fields = first_fields(paths)
    labeled = "label" in fields and "chosen" not in fields
    if labeled and not kto:
        raise TrainingError(
            f"{paths[0]} has single answers with a label, which only preference.kind=kto supports; use that, or chosen and"
            " rejected answers"
        )
    with name_format_setting("chats.format"):
        if labeled:
            answers, desirable, counts = open_labeled(paths, tokenizer, length, reading)
        else:
            chosen, rejected, counts = open_preferences(paths, tokenizer, length, reading)
            if not kto:
                return Pairs(chosen, rejected), counts
            answers = concatenate((chosen, rejected))
            desirable = np.arange(answers.document_count) < chosen.document_count
    return Pairs(answers, mismatched_answers(answers, length), desirable), counts


class PreferenceBatchSource:
    """Rows of pairs, epoch after epoch; see `interface.BatchSource`."""

    def __init__(self, recipe: Recipe, train: Pairs, validation: Pairs, context: TaskContext) -> None:
        self._options, self._validation = preference_options(recipe), limit_pairs(validation, recipe.evaluate_tokens)
        program = context.program
        self._program, self._length = program, recipe.length
        nats = partial(token_nats, program.config, compute=compute_of(recipe), sharding=program.eval_sharding)
        self._nats = program.jit(nats)
        position = context.data_state or {"next_batch": 0}
        cached: np.ndarray | None = None
        self._reference: dict[str, str] = {}
        self._validation_reference: np.ndarray | None = None
        if needs_reference(self._options):
            if context.base is not None:  # adapters disabled; each step computes those of its rows
                self._validation_reference = self._measure(context.base, self._validation).logprobs
            else:
                logprobs, digest = self._cached(context, {"train": train, "validation": validation})
                cached, self._validation_reference = logprobs["train"], logprobs["validation"][: self._validation.count]
                self._reference = {"reference": digest}
        shard, shards = program.data_shard
        rows = PairRows(train, recipe.batch, recipe.length, seed=recipe.seed, host=shard, hosts=shards, reference=cached)
        self._batches = Batches(rows, position["next_batch"])

    def _measure(self, model: LlamaParams, pairs: Pairs, progress: MegabyteProgress | None = None) -> AnswerLogprobs:
        """Log-probabilities of N pairs of answers, float32[N, 2], and the answers' token counts."""
        config, fitted = self._program.config, self._program.prepare_params(model)
        batch = self._program.eval_sharding.batch_shards * default_batch()
        answers = pair_logprobs(
            config, fitted, pairs, length=self._length, batch=batch, measure=self._nats, progress=progress
        )
        return replace(answers, logprobs=answers.logprobs.astype(np.float32))

    def _cached(self, context: TaskContext, parts: dict[str, Pairs]) -> tuple[dict[str, np.ndarray], str]:
        """Log-probabilities of the initial model, and their digest: computed once, and stored in the folder."""
        path = context.folder / REFERENCE
        if context.data_state is None:
            params, bar = context.state.params, progress_bar("reference", "batches", quiet=context.log.quiet, delay=1.0)
            logprobs = {name: self._measure(params, pairs, bar).logprobs for name, pairs in parts.items()}
            if context.processes.index == 0:
                with write_atomically(path, raises=TrainingError) as target, target.open("wb") as target_file:
                    np.savez(target_file, train=logprobs["train"], validation=logprobs["validation"])
            return logprobs, arrays_digest(logprobs)
        try:
            with path.open("rb") as file, np.load(file) as arrays:
                logprobs = {name: arrays[name] for name in parts}
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise TrainingError(
                f"{path}, the log-probabilities of the initial model, cannot be read ({error}); copy it from"
                " the run's previous location, or start again in another --workdir"
            ) from None
        digest = arrays_digest(logprobs)
        if context.data_state.get("reference") != digest:
            raise TrainingError(f"{path} is not from this run: its values differ; copy it from the run's previous location")
        return logprobs, digest

    @property
    def state(self) -> dict[str, Any]:
        return {**self._batches.state, **self._reference}

    def next(self, model: Callable[[], LlamaParams]) -> PairBatch:
        return next(self._batches)

    def report(self, metrics: dict[str, float]) -> dict[str, float]:
        return means(metrics)

    def evaluate(self, model: LlamaParams) -> EvalResult:
        """The numbers of `means`, and the mean loss over pairs, or over answers for KTO."""
        numbers, count = (
            preference_metrics(
                self._measure(model, self._validation), self._validation_reference, self._validation, self._options
            ),
            self._validation.count,
        )
        accuracy = f", accuracy {numbers['accuracy']:.3f}" if "accuracy" in numbers else ""
        text = f"loss {numbers['loss']:.4f}{accuracy}, margin {numbers['margin']:.4f} ({count:,} held out)"
        return EvalResult(numbers, text)

    def close(self) -> None:
        self._batches.close()


def limit_pairs(pairs: Pairs, limit: int) -> Pairs:
    """The first pairs with about `limit` tokens, unless that is 0."""
    if not limit:
        return pairs
    chosen = 1 + int(np.searchsorted(np.cumsum(2 * pairs.sizes), limit))
    return pairs.select(np.arange(min(chosen, pairs.count)))


def arrays_digest(arrays: dict[str, np.ndarray]) -> str:
    """SHA-256 of arrays by name."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return digest.hexdigest()


def preference_metrics(
    answers: AnswerLogprobs, reference: np.ndarray | None, pairs: Pairs, options: PreferenceOptions
) -> dict[str, float]:
    """The numbers of an evaluation, from the log-probabilities of N pairs under model and reference: float32[N, 2] each."""
    rows = PairBatch(
        *(None,) * 4,
        there=np.ones((pairs.count, 1), bool),
        desirable=None if pairs.desirable is None else pairs.desirable[:, None],
        reference=None if reference is None else reference[..., None],
    )
    if options.kind == "kto":
        assert reference is not None
        divergence = np.mean(answers.logprobs[:, 1] - reference[:, 1])
        rows = rows._replace(divergence=np.full(pairs.count, divergence))
    answer_sums = AnswerSums(*(jnp.asarray(array[..., None], jnp.float32) for array in (answers.logprobs, answers.tokens)))
    result = preferred(answer_sums, rows, options)
    sums = {name: float(value) for name, value in sums_of(answer_sums, result, rows).items()}
    return {"loss": float(result.losses.sum()) / pairs.count, **means(sums)}


def means(sums: dict[str, float]) -> dict[str, float]:
    """Numbers from the sums that `pair_loss` returns.

    The margin is the mean reward of the chosen answers minus that of the rejected ones; rewards are described in
    `Preferred`. The accuracy is the share of pairs whose chosen answer has the larger reward; KTO has none, and its chosen
    answers are the good ones. Log-probabilities are means of the sums over an answer's tokens.
    """
    chosen, rejected = max(sums["chosen"], 1.0), max(sums["rejected"], 1.0)
    reward = sums["chosen_reward"] / chosen, sums["rejected_reward"] / rejected
    return {
        **({"accuracy": sums["right"] / chosen} if "right" in sums else {}),
        "margin": reward[0] - reward[1],
        "chosen_reward": reward[0],
        "rejected_reward": reward[1],
        "chosen_logprob": sums["chosen_logprob"] / chosen,
        "rejected_logprob": sums["rejected_logprob"] / rejected,
    }
