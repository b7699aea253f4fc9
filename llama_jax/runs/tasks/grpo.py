"""Training with rewards: the model's own answers to prompts, scored by the user's functions (GRPO and its variants)."""

from __future__ import annotations

import base64
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from llama_jax.config import LlamaConfig
from llama_jax.data.rl_prompts import (
    PromptBatch,
    PromptReading,
    PromptSet,
    open_prompts,
    prompt_batch,
    split_prompts,
    validation_prompt_batch,
    without_prompts,
)
from llama_jax.errors import TrainingError, short_repr
from llama_jax.inference.rollouts import Completions, RolloutOptions, RolloutPrompts, roll_out
from llama_jax.model.forward_options import ComputeOptions, Sharding
from llama_jax.model.params import LlamaParams
from llama_jax.ops.rope_scaling import LENGTH_DEPENDENT
from llama_jax.parallel.generation_sharding import generation_sharding
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.sharding import training_sharding
from llama_jax.runs.compiled_step import loss_options
from llama_jax.runs.pretrained import load_frozen
from llama_jax.runs.recipe import Recipe, RewardSettings, data_warnings, fit_to_data
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
from llama_jax.runs.user_functions import (
    STOPPED,
    Reward,
    check_columns,
    compute_rewards,
    find_rewards,
    rewards_digest,
    weighted_sum,
)
from llama_jax.tokenizers import TextStream, Tokenizer
from llama_jax.tokenizers.interface import check_token_rows
from llama_jax.training.batch import Batch
from llama_jax.training.flops import step_flops
from llama_jax.training.loss import LossOptions
from llama_jax.training.policy_gradient import PolicyOptions, group_advantages
from llama_jax.training.policy_loss import AnswerLoss, ScoredAnswers


def check_rewards(recipe: Recipe, mesh: MeshSizes) -> None:
    """Checks that need no data; raises TrainingError, MeshError."""
    r = reward_settings(recipe)
    if recipe.chats is not None:
        raise TrainingError("rewards are for prompts, and chats for conversations; omit one of them")
    if recipe.batch % r.group:
        raise TrainingError(f"batch={recipe.batch} answers must be a multiple of rewards.group={r.group}")
    if recipe.exact and mesh.devices > 1:
        raise TrainingError(f"exact=true samples on a single device, but the mesh is {mesh}; omit one of them")
    prompts = recipe.batch // r.group
    if prompts % mesh.rows:
        raise TrainingError(
            f"batch={recipe.batch} / rewards.group={r.group} = {prompts} prompts, which cannot be divided over"
            f" data*fsdp={mesh.rows}; use a multiple"
        )
    if r.answer > recipe.length:
        raise TrainingError(f"rewards.answer={r.answer} leaves no room for a prompt in length={recipe.length}")
    scaling = recipe.model.rope_scaling
    if scaling is not None and scaling.kind in LENGTH_DEPENDENT and recipe.length >= (scaling.original_max_seq_len or 0):
        raise TrainingError(
            f"with rope scaling {scaling.kind!r} generation caches different keys than a pass over a row of"
            f" over {scaling.original_max_seq_len} tokens; set a length below that"
        )


def open_rewards(recipe: Recipe, inputs: TaskInputs) -> Task:
    """Prompts and reward functions as a task.

    Raises:
      TrainingError: functions with the wrong arguments; see also `find_rewards`.
      DataError: invalid prompts.
    """
    r = reward_settings(recipe)
    rewards = find_rewards(r.functions, r.weights)
    reading, longest = PromptReading(r.format, r.special, r.template_time, r.template_args), recipe.length + 1 - r.answer

    def read(paths: Any) -> PromptSet:
        with name_format_setting("rewards.format"):
            prompts = open_prompts(paths, inputs.tokenizer, longest, reading)
        with name_size_setting(inputs.tokenizer):
            for number, ids in enumerate(prompts.ids, 1):
                check_token_rows(inputs.tokenizer, ids, recipe.model.vocab_size, f"prompt {number}")
        return prompts

    if inputs.validation_data:
        prompt_set, validation = read(inputs.data), read(inputs.validation_data)
        train = without_prompts(prompt_set, validation)
        if len(train) < len(prompt_set):
            twice = len(prompt_set) - len(train)
            warnings.warn(f"{twice} prompts of the data are also in the validation data: not trained on", stacklevel=2)
    else:
        train, validation = split_prompts(read(inputs.data), recipe.validation, recipe.seed)
    for prompts in (train, validation):
        check_columns(rewards, tuple(prompts.columns))
    digests = {"train": train.digest, "validation": validation.digest, "rewards": rewards_digest(rewards)}
    reference = None
    if r.beta and recipe.lora is None:
        if inputs.weights is None:
            raise TrainingError("rewards.beta penalizes divergence from the initial model; pass it with --weights")
        reference, known = load_frozen(inputs.weights, recipe.model, inputs.mesh, recipe.dtype, None)
        digests["reference"] = known["digest"]
    # A prompt has `group` answers, each used in `updates` steps.
    recipe = fit_to_data(recipe, inputs.mesh, recipe.length, lambda _: len(train) * r.group, r.group, r.updates)
    batch, length = recipe.batch, length_of(recipe, train, validation)
    return Task(
        recipe=recipe,
        objective=replace(reward_objective(recipe, length), frozen=reference),
        digests=digests,
        facts=describe_prompts(recipe, train, validation),
        tokens=batch * length,
        # Sampling processes each token once: a forward pass, a third of a full training step.
        flops=step_flops(recipe.model, batch, length, lora=recipe.lora) + step_flops(recipe.model, batch, length) / 3,
        decoded=r.answer / r.updates,
        begin=partial(RewardBatchSource, recipe, rewards, (train, validation), inputs),
        logged_metrics=("reward", "length", "stopped", "flat", "kl", "clipped"),
    )


REWARDS = TaskType("rewards", open_rewards, check_rewards, divides_rows=False, exact=True)


def reward_settings(recipe: Recipe) -> RewardSettings:
    """The reward settings of a recipe that has them."""
    assert recipe.rewards is not None
    return recipe.rewards


def loss_of(recipe: Recipe) -> AnswerLoss:
    """The loss of the recipe."""
    r = reward_settings(recipe)
    length = r.answer if r.loss == "dr_grpo" else None
    return AnswerLoss(PolicyOptions(r.loss, r.clip, r.clip_high, r.beta, length), r.temperature)


def length_of(recipe: Recipe, train: PromptSet, validation: PromptSet) -> int:
    """T: the part of the recipe's length that the longest prompt and an answer need."""
    return max(train.longest, validation.longest) + reward_settings(recipe).answer - 1


def reward_objective(recipe: Recipe, length: int) -> Objective:
    """The recipe's loss for scored answers in rows of T target tokens."""
    r, loss = reward_settings(recipe), loss_of(recipe)
    logprobs = jax.ShapeDtypeStruct((recipe.batch, length), jnp.float32)
    tokens = jax.ShapeDtypeStruct((recipe.batch, length + 1), jnp.int32)
    batch_shapes = ScoredAnswers(
        batch=Batch(tokens, loss_mask=jax.ShapeDtypeStruct(tokens.shape, jnp.bool_)),
        advantages=jax.ShapeDtypeStruct((recipe.batch,), jnp.float32),
        sampler_logprobs=logprobs,
        old_logprobs=logprobs if r.updates > 1 else None,
        lengths=jax.ShapeDtypeStruct((recipe.batch,), jnp.int32),
    )

    def make_prepare_batch(frozen: FrozenModels) -> Callable[..., ScoredAnswers]:
        if frozen.base is not None:
            return loss.with_reference(frozen.base, recipe.accumulate)

        def add_reference(
            config: LlamaConfig, params: LlamaParams, scored: ScoredAnswers, options: LossOptions, sharding: Sharding
        ) -> ScoredAnswers:
            prepare_batch = loss.with_reference(sharding.prepare_params(frozen.other), recipe.accumulate)
            return prepare_batch(config, params, scored, options, sharding)

        return add_reference

    return Objective(
        batch_shapes,
        lambda _: loss,
        loss.count,
        make_prepare_batch if r.beta else None,
        count_tokens=lambda scored: jnp.sum(scored.lengths, dtype=jnp.float32),
    )


def describe_prompts(recipe: Recipe, train: PromptSet, validation: PromptSet) -> tuple[str, ...]:
    """Lines about the amount of data."""
    r = reward_settings(recipe)
    prompts = recipe.batch // r.group
    epochs = recipe.steps / r.updates * prompts / len(train)
    dropped = f", {train.dropped:,} omitted as longer than {recipe.length + 1 - r.answer} tokens" if train.dropped else ""
    line = (
        f"data: {len(train):,} prompts to train on, of at most {train.longest} tokens{dropped}, {len(validation):,} to"
        f" evaluate on; {r.group} answers of at most {r.answer} tokens to each of {prompts} prompts, {epochs:.1f} epochs"
    )
    return line, *data_warnings(epochs, len(train), prompts, unit="prompts")


class RewardBatchSource:
    """Answers sampled from the current model and scored; see `interface.BatchSource`."""

    def __init__(
        self,
        recipe: Recipe,
        rewards: Sequence[Reward],
        prompts: tuple[PromptSet, PromptSet],
        inputs: TaskInputs,
        context: TaskContext,
    ) -> None:
        self._recipe, self._settings, self._rewards = recipe, reward_settings(recipe), rewards
        self._train, self._validation = prompts
        self._tokenizer, self._log, self._program = inputs.tokenizer, context.log, context.program
        self._prompts = recipe.batch // self._settings.group
        # The size for all data, so that one program serves all batches.
        self._width = max(self._train.longest, self._validation.longest)
        self._length = length_of(recipe, *prompts)
        position = context.data_state or {"next_batch": 0, "update": 0, "rows": None, "found": [], "reported": False}
        self._number, self._update = position["next_batch"], position["update"]
        self._rows = None if position["rows"] is None else unpack_arrays(position["rows"], self._shapes())
        # For the batches since the last report, or for the one before.
        self._statistics: list[dict[str, float]] = position["found"]
        self._reported: bool = position["reported"]
        model = self._program.model_params(context.state.params)
        mesh = make_mesh(inputs.mesh)
        self._log.progress("compiling the sampler")
        self._sample = self._compiled_sampler(model, mesh)
        self._score = self._compiled_score(model, mesh) if self._settings.updates > 1 else None

    def _shapes(self) -> ScoredAnswers:
        return reward_objective(self._recipe, length_of(self._recipe, self._train, self._validation)).batch_shapes

    def _compiled_sampler(self, model: LlamaParams, mesh: jax.sharding.Mesh) -> Any:
        """One program for all batches, compiled before the first step."""
        r = self._settings
        options = RolloutOptions(r.group, r.answer, r.temperature, self._train.stops)
        sample = make_sampler(self._recipe.model, mesh, options, compute_of(self._recipe))
        chosen = self._prompt_arrays(self._train, prompt_batch(len(self._train), self._prompts, r.group, seed=0, number=0))
        jitted: Any = self._program.jit(sample)
        return jitted.lower(model, chosen).compile()

    def _compiled_score(self, model: LlamaParams, mesh: jax.sharding.Mesh) -> Any:
        """The trainer's log-probabilities of the rows, computed in microbatches as in the step."""
        config, sharding = training_sharding(self._recipe.model, mesh)
        options, parts = loss_options(self._recipe), self._recipe.accumulate

        def score(model: LlamaParams, batch: Batch) -> jax.Array:
            with sharding.context():
                loss = loss_of(self._recipe).with_reference(sharding.prepare_params(model), parts)
                return loss(config, None, ScoredAnswers(batch, None, None), options, sharding).reference

        jitted: Any = self._program.jit(score)
        return jitted.lower(model, self._shapes().batch).compile()

    @property
    def state(self) -> dict[str, Any]:
        rows = None if self._rows is None else pack_arrays(self._rows)
        state = {"next_batch": self._number, "update": self._update, "rows": rows}
        return {**state, "found": self._statistics, "reported": self._reported}

    def next(self, model: Callable[[], LlamaParams]) -> ScoredAnswers:
        if self._rows is None:
            self._rows = self._sample_and_score(model())
        rows = self._rows
        self._update += 1
        if self._update == self._settings.updates:  # these answers have been used in all updates
            self._number, self._update, self._rows = self._number + 1, 0, None
        shard, shards = self._program.data_shard
        size = self._recipe.batch // shards
        return jax.tree.map(lambda part: part[shard * size : (shard + 1) * size], rows)

    def report(self, metrics: dict[str, float]) -> dict[str, float]:
        """Means since the last report; the step's own metrics are those of the last step."""
        means = {name: float(np.mean([statistics[name] for statistics in self._statistics])) for name in self._statistics[0]}
        self._statistics = self._statistics[-1:]
        self._reported = True
        tokens = max(metrics["tokens"], 1)
        divergence = {"kl": metrics["divergence"] / tokens} if self._settings.beta else {}
        return {**means, **divergence, "clipped": metrics["clipped"] / tokens, "gap": metrics["gap"] / tokens}

    def evaluate(self, model: LlamaParams) -> EvalResult:
        """Evaluate answers to held-out prompts, sampled as in training.

        The numbers are the mean reward of all answers and its standard error from the variance between prompts, nan for a
        single prompt; the mean tokens of an answer; the share of answers ended by a stop token; and -reward as the loss.
        """
        r, count = self._settings, min(len(self._validation), self._settings.held or len(self._validation))
        totals, lengths, stopped = [], [], []
        for begin in range(0, count, self._prompts):
            numbers = np.arange(begin, begin + self._prompts)
            answers, texts, values, _ = self._answer(
                model, self._validation, validation_prompt_batch(numbers % count, r.group, self._recipe.seed)
            )
            real = np.repeat(numbers < count, r.group)
            totals.append(weighted_sum(self._rewards, values)[real])
            lengths.append(answers.valid.sum(axis=1)[real])
            stopped.append(answers.stopped[real])
            for i in range(begin, min(count, begin + self._prompts, r.samples)):
                self._show(i, texts[(i - begin) * r.group], totals[-1][(i - begin) * r.group])
        reward = np.concatenate(totals)
        of_prompts = reward.reshape(-1, r.group).mean(axis=1)
        error = float(of_prompts.std(ddof=1) / np.sqrt(len(of_prompts))) if len(of_prompts) > 1 else float("nan")
        mean = float(reward.mean())
        length, ended = float(np.concatenate(lengths).mean()), float(np.concatenate(stopped).mean())
        means = {"loss": -mean, "reward": mean, "standard_error": error, "length": length, "stopped": ended}
        spread = "" if np.isnan(error) else f" ± {error:.4f}"
        text = f"reward {mean:.4f}{spread}, {length:.1f} tokens, {ended:.0%} ended ({len(reward)} answers)"
        return EvalResult(means, text)

    def close(self) -> None:
        """Nothing to close."""

    def _show(self, number: int, text: str, reward: float) -> None:
        """Log a held-out prompt (its end, because prompts often begin alike), its first answer and the reward."""
        prompt = self._tokenizer.decode(list(self._validation.ids[number]))
        end = prompt if len(prompt) <= 80 else f"...{prompt[-77:]}"
        self._log.line(f"    [{reward:.4g}] {short_repr(end, 80)} -> {short_repr(text, 400)}")

    def _sample_and_score(self, model: LlamaParams) -> ScoredAnswers:
        """Rows to train on."""
        r = self._settings
        chosen = prompt_batch(len(self._train), self._prompts, r.group, seed=self._recipe.seed, number=self._number)
        answers, texts, values, seconds = self._answer(model, self._train, chosen)
        rewards = weighted_sum(self._rewards, values)
        advantages = group_advantages(rewards, r.group, scale=r.scale)
        learned = answers.stopped if r.truncated == "mask" else np.ones(len(texts), bool)
        rows = answer_rows([self._train.ids[i] for i in chosen.numbers], answers, learned, self._length)
        scored = rows._replace(advantages=np.asarray(advantages.values, np.float32))
        if self._score is not None:
            scored = scored._replace(old_logprobs=np.asarray(self._score(model, rows.batch)))
        lengths = answers.valid.sum(axis=1)
        statistics = {
            "reward": rewards.mean(),
            "reward_std": rewards.std(),
            "length": lengths.mean(),
            "stopped": answers.stopped.mean(),
            "flat": float(advantages.flat) / self._prompts,
            "rollout_seconds": seconds,
        }
        if len(self._rewards) > 1:
            statistics |= {f"reward_{i}": value.mean() for i, value in enumerate(values)}
        if self._reported:
            self._statistics, self._reported = [], False
        self._statistics.append({name: float(value) for name, value in statistics.items()})
        return scored

    def _answer(
        self, model: LlamaParams, prompts: PromptSet, chosen: PromptBatch
    ) -> tuple[Completions, list[str], np.ndarray, float]:
        """Answers, their texts, the rewards from each function, and the seconds spent on sampling."""
        began = time.perf_counter()
        completions = self._sample(model, self._prompt_arrays(prompts, chosen))
        answers = Completions(*(np.asarray(part) for part in completions))
        seconds = time.perf_counter() - began
        if np.isnan(answers.logprobs[answers.valid]).any():
            raise TrainingError("the model's logits are not finite while it answers; try a lower optimizer.learning_rate")
        stops = set(prompts.stops)
        ids = [row[valid].tolist() for row, valid in zip(answers.tokens, answers.valid, strict=True)]
        texts = [answer_text(self._tokenizer, row[:-1] if row[-1] in stops else row) for row in ids]
        group = self._settings.group
        columns = {
            name: [values[i] for i in chosen.numbers for _ in range(group)] for name, values in prompts.columns.items()
        }
        columns[STOPPED] = answers.stopped.tolist()
        return answers, texts, self._agreed(texts, columns), seconds

    def _agreed(self, texts: list[str], columns: dict[str, list[Any]]) -> np.ndarray:
        """The rewards; with several processes those of process 0, since a function may be random."""
        if jax.process_count() == 1:
            return compute_rewards(self._rewards, texts, columns)
        values = np.full((len(self._rewards), len(texts)), np.nan)
        problem: TrainingError | None = None
        if jax.process_index() == 0:
            try:
                values = compute_rewards(self._rewards, texts, columns)
            except TrainingError as error:
                problem = error
        # As bits: JAX would round them to float32, and results would differ between one and several processes.
        values = np.asarray(multihost_utils.broadcast_one_to_all(values.view(np.uint32))).view(np.float64)
        if problem is not None:
            raise problem
        if np.isnan(values).any():
            raise TrainingError("the rewards of process 0 failed; see its error")
        return values

    def _prompt_arrays(self, prompts: PromptSet, chosen: PromptBatch) -> RolloutPrompts:
        tokens = np.zeros((len(chosen.numbers), self._width), np.int32)
        lengths = np.array([len(prompts.ids[i]) for i in chosen.numbers], np.int32)
        for row, i in zip(tokens, chosen.numbers, strict=True):
            row[: len(prompts.ids[i])] = prompts.ids[i]
        return RolloutPrompts(tokens, lengths, chosen.seeds)


def make_sampler(
    config: LlamaConfig, mesh: Mesh, options: RolloutOptions, compute: ComputeOptions
) -> Callable[[LlamaParams, RolloutPrompts], Completions]:
    """`roll_out` for a model sharded as in training, possibly with adapters or quantized weights."""
    sampling_config, sharding = generation_sharding(config, mesh)

    def sample(model: LlamaParams, prompts: RolloutPrompts) -> Completions:
        with sharding.context():
            fitted = sharding.prepare_params(model)
        return roll_out(sampling_config, fitted, prompts, options, compute, sharding)

    return sample


def answer_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text that an answer adds to its prompt, including a leading space."""
    stream = TextStream(tokenizer)
    return "".join([*map(stream.push, ids), stream.finish()])


def answer_rows(prompts: Sequence[Sequence[int]], answers: Completions, learned: np.ndarray, length: int) -> ScoredAnswers:
    """Concatenated prompts and answers, [B, T + 1], without advantages.

    Args:
      learned: bool[B], whether the answer's tokens are in the mask.
    """
    batch = len(answers.tokens)
    group = batch // len(prompts)
    tokens, mask = np.zeros((batch, length + 1), np.int32), np.zeros((batch, length + 1), bool)
    sampler_logprobs, lengths = np.zeros((batch, length), np.float32), np.zeros(batch, np.int32)
    for i in range(batch):
        prompt, count = prompts[i // group], int(answers.valid[i].sum())
        begin, end = len(prompt), len(prompt) + count
        tokens[i, :begin], tokens[i, begin:end] = prompt, answers.tokens[i, :count]
        mask[i, begin:end] = learned[i]
        sampler_logprobs[i, begin - 1 : end - 1] = answers.logprobs[i, :count]
        lengths[i] = end
    return ScoredAnswers(Batch(tokens, loss_mask=mask), np.zeros(batch, np.float32), sampler_logprobs, lengths=lengths)


def pack_arrays(scored: ScoredAnswers) -> str:
    """Arrays as JSON text, bit for bit."""
    content = b"".join(np.ascontiguousarray(part).tobytes() for part in jax.tree.leaves(scored))
    return base64.b64encode(zlib.compress(content, 1)).decode()


def unpack_arrays(text: str, shapes: ScoredAnswers) -> ScoredAnswers:
    """Undoes `pack_arrays`."""
    content, offset = zlib.decompress(base64.b64decode(text)), 0
    leaves, form = jax.tree.flatten(shapes)
    arrays = []
    for leaf in leaves:
        size = leaf.size * leaf.dtype.itemsize
        arrays.append(np.frombuffer(content[offset : offset + size], leaf.dtype).reshape(leaf.shape))
        offset += size
    return jax.tree.unflatten(form, arrays)
