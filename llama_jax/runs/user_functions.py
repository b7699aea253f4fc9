"""Functions in the user's own Python files: recipes, parts of models, and rewards, whose results are checked."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from llama_jax.config import LlamaConfig, Parts
from llama_jax.config.parts import function_name
from llama_jax.errors import ConfigError, TrainingError, UserError, reason_of, short_repr
from llama_jax.storage import resolved

COMPLETIONS = "completions"
STOPPED = "stopped"


def load_function(name: str, what: str) -> Callable[..., Any]:
    """Run a file, which may import from its own folder, and return its function of this name.

    Args:
      what: the purpose of the function, for messages.

    Raises:
      TrainingError: an invalid name, a file that does not exist or fails, or no such function in it.
    """
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py") or not function:
        raise TrainingError(f"{what} {name!r} is not FILE.py:FUNCTION")
    loaded = getattr(_run_file(file, name, what), function, None)
    if not callable(loaded):
        problem = "is not a function" if loaded is not None else "does not exist"
        raise TrainingError(f"{what} {name!r}: {resolved(Path(file))} has no function {function!r}: it {problem}")
    return loaded


def _run_file(file: str, name: str, what: str) -> ModuleType:
    """Run a Python file as a separate module; for the errors see `load_function`."""
    path = resolved(Path(file))
    if not path.is_file():
        raise TrainingError(f"{what} {name!r}: {path} does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses in the file resolve their annotations there
    sys.path.insert(0, str(path.parent))  # the file may import its neighbors, like a script
    try:
        with _errors_of_user_code(name, what):
            spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def with_parts(config: LlamaConfig, source: str | os.PathLike[str] | ModuleType | Parts) -> LlamaConfig:
    """The configuration of a loaded model with functions in place of the names in its `parts`.

    Args:
      source: where to find the functions: a Python file, which is run; a module; or `Parts` of functions.

    Raises:
      ConfigError: the model names none, or a function does not exist.
      TrainingError: the file does not exist, or fails.
    """
    where = repr(source) if isinstance(source, Parts) else getattr(source, "__name__", None) or os.fspath(source)
    if not config.parts.missing:
        raise ConfigError(f"the model names no custom parts, so none are needed from {where}; omit it")
    if isinstance(source, str | os.PathLike):
        if not where.endswith(".py"):
            raise ConfigError(f"parts={short_repr(where)} is not a Python file, FILE.py")
        source = _run_file(where, where, "parts")
    functions = {part: _find(source, where, part, name) for part, name in config.parts.missing.items()}
    return replace(config, parts=Parts(**functions).over(config.parts))


def _find(source: ModuleType | Parts, where: str, part: str, name: str) -> Callable[..., Any]:
    """The function with this name."""
    module, _, qualified = name.partition(":")
    member: Any = source
    for step in [part] if isinstance(source, Parts) else qualified.split("."):
        member = getattr(member, step, None)
    if not callable(member):
        raise ConfigError(f"{where} has no function {qualified!r}, which the model uses as its {part} ({name})")
    its_module, _, its_name = str(function_name(part, member)).partition(":")
    # A file that is imported by a package, or run as a script, has another name there than by itself.
    modules = {module_name.rpartition(".")[2] for module_name in (module, its_module)} - {"__main__"}
    if its_name != qualified or len(modules) > 1:
        raise ConfigError(
            f"{where} has {its_module}:{its_name} as {qualified!r}, but the model's {part} is {name}; pass the file of that"
        )
    return member


def call_function(name: str, what: str) -> Any:
    """Call the function of this name without arguments; TrainingError as for `load_function`, or if it fails."""
    make = load_function(name, what)
    with _errors_of_user_code(name, what):
        return make()


@contextmanager
def _errors_of_user_code(name: str, what: str, own_errors: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Turn exceptions and exits of user code into an error that names its last line.

    Args:
      own_errors: errors that a function within a run may raise itself, `UserError` and KeyboardInterrupt: in a run, Ctrl-C
        never arrives as an exception.
    """
    try:
        yield
    except BaseException as error:
        is_caught = isinstance(
            error, (Exception, SystemExit, *own_errors)
        )  # otherwise `exit()` would end a run as if it were complete
        if not is_caught or (isinstance(error, UserError) and not own_errors):
            raise
        message = f"{type(error).__name__}: {reason_of(error)}" if str(error) else type(error).__name__
        path = str(resolved(Path(name.rpartition(":")[0] or name)))
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        file_frames = [frame for frame in frames if frame.filename == path]
        if isinstance(error, SyntaxError) and error.filename == path:
            message += f" ({path}, line {error.lineno})"
        elif frames:
            last = (file_frames or frames)[-1]
            line = f": {last.line}" if last.line else ""
            message += f" ({last.filename}, line {last.lineno}, in {last.name}{line})"
        elif own_errors:  # in the call itself
            message += "; call it as function(completions, **columns)"
        raise TrainingError(f"{what} {name!r} failed with {message}") from None


@dataclass(frozen=True)
class Reward:
    """A function that gives each answer a number; higher is better.

    Attributes:
      name: FILE.py:FUNCTION.
      function: called as ``function(completions, **columns)``, with the texts of the answers and, for each field in the
        data, its values for their prompts; lists of equal length. If it accepts ``stopped``, it also receives whether each
        answer ended before the limit.
      weight: its factor in the sum of all rewards.
      digest: SHA-256 of the file.
    """

    name: str
    function: Callable[..., Sequence[float]]
    weight: float
    digest: str

    def __call__(self, completions: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> np.ndarray:
        """The rewards of answers: float64[B]; see `compute_rewards` for the errors."""
        names = [name for name in columns if name != STOPPED or self.accepts(STOPPED)]
        with _errors_of_user_code(self.name, "reward", (KeyboardInterrupt,)):
            # Copies: changes by one function do not affect others.
            returned: Any = self.function(list(completions), **{name: list(columns[name]) for name in names})
            if inspect.isgenerator(returned):  # it may never end
                returned = list(islice(returned, len(completions) + 1))
        if inspect.iscoroutine(returned):
            returned.close()  # otherwise Python warns that the coroutine was never awaited
        try:  # texts have no numbers, mappings and sets no order
            values = None if isinstance(returned, (str, bytes, Mapping, Set)) else list(returned)
        except TypeError:
            values = None
        if values is None or len(values) != len(completions):
            answer = short_repr(returned, 40) if values is None else f"{len(values)} values for {len(completions)} answers"
            raise TrainingError(
                f"reward {self.name} returned {answer}; it must return a list of {len(completions)} numbers, one for each"
                " answer"
            )
        for value, completion in zip(values, completions, strict=True):
            if not _is_number(value):
                raise TrainingError(
                    f"reward {self.name} returned {short_repr(value, 40)} for the answer {short_repr(completion, 60)}; it"
                    " must be a finite number"
                )
        return np.array([float(value) for value in values])

    def accepts(self, name: str) -> bool:
        """Whether the function can be called with an argument of this name."""
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError):  # builtins have no signature
            return False
        parameter_kind = parameters[name].kind if name in parameters else None
        return parameter_kind not in (None, inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL) or any(
            parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
        )


def find_rewards(names: Sequence[str], weights: Sequence[float] = ()) -> tuple[Reward, ...]:
    """The functions named ``FILE.py:FUNCTION``, whose files are run.

    Args:
      weights: one for each; empty for 1 each.

    Raises:
      TrainingError: no name, a missing file or function, a file that fails, or a wrong number of weights.
    """
    if not names:
        raise TrainingError("rewards need a function; pass one with --reward FILE.py:FUNCTION")
    if weights and len(weights) != len(names):
        raise TrainingError(f"weights={list(weights)} has {len(weights)} for {len(names)} rewards; pass one for each")
    rewards = []
    for name, weight in zip(names, weights or [1.0] * len(names), strict=True):
        function = load_function(name, "reward")
        digest = hashlib.sha256(Path(name.rpartition(":")[0]).read_bytes()).hexdigest()
        rewards.append(Reward(name, function, float(weight), digest))
    return tuple(rewards)


def rewards_digest(rewards: Sequence[Reward]) -> str:
    """A digest of their names and files, wherever these are, by which a resumed run recognizes the rewards."""
    digest = hashlib.sha256()
    for reward in rewards:
        digest.update(f"{reward.name.rpartition(':')[2]} {reward.digest}\n".encode())
    return digest.hexdigest()


def check_columns(rewards: Sequence[Reward], columns: Sequence[str]) -> None:
    """Raise TrainingError for a function that does not accept the columns of the data, before anything is sampled."""
    for name, what in ((COMPLETIONS, "the name of the answers"), (STOPPED, "whether an answer ended before the limit")):
        if name in columns:
            raise TrainingError(f"the data has a field {name!r}, which is {what}; rename it")
    for reward in rewards:
        try:
            signature = inspect.signature(reward.function)
        except (TypeError, ValueError):  # builtins have no signature
            continue
        try:
            also = [STOPPED] if reward.accepts(STOPPED) else []
            signature.bind([], **{name: [] for name in (*columns, *also)})
        except TypeError as error:
            arguments = ", ".join(f"{name}=..." for name in columns)
            raise TrainingError(
                f"reward {reward.name} cannot be called as ({COMPLETIONS}, {arguments}), with the fields of the data"
                f" ({reason_of(error)}); write it as def f({COMPLETIONS}, **columns), and add to"
                " the data the fields that it uses"
            ) from None


def compute_rewards(
    rewards: Sequence[Reward], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
) -> np.ndarray:
    """The rewards of each function for each answer: float64[functions, B].

    Raises:
      TrainingError: a function raises, by its file and line; or returns anything but a finite number for each answer.
    """
    return np.array([reward(completions, columns) for reward in rewards])


def weighted_sum(rewards: Sequence[Reward], values: np.ndarray) -> np.ndarray:
    """The sum of all rewards, each times its weight: float64[B].

    Answers with the same terms, in any order, have the same sum: else their group would seem to differ. A matrix product
    rounds differently by the position in the batch.
    """
    terms = np.array([[reward.weight] for reward in rewards]) * values
    return np.sum(np.sort(terms, axis=0), axis=0)


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str) and math.isfinite(float(value))
    except Exception:  # conversions may raise anything, such as RuntimeError for a tensor of two numbers
        return False
