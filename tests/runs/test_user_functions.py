"""Functions that judge answers: how they are called, and what is said of those that cannot be."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_jax.errors import TrainingError
from llama_jax.runs.user_functions import Reward, check_columns, compute_rewards, find_rewards, weighted_sum

FILE = """
import math

def length(completions, **columns):
    return [len(text) for text in completions]

def exact(completions, answer, **_):
    return [float(text == wanted) for text, wanted in zip(completions, answer)]

def inner(text):
    return 1 / len(text)

def fails(completions, **columns):
    return [inner(text) for text in completions]

def short(completions, **columns):
    return [1.0]

def not_a_number(completions, **columns):
    return [math.nan for _ in completions]

def nothing(completions, **columns):
    return None

def vandal(completions, **columns):
    completions.clear()
    return [0.0, 0.0]

def leaves(completions, **columns):
    raise SystemExit(0)

def endless(completions, **columns):
    while True:
        yield 1.0

def only(completions):
    return [0.0 for _ in completions]

def none():
    return []

def refuses(completions, **columns):
    from llama_jax import UserError
    raise UserError("no judge")

number = 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "mine.py"
    path.write_text(FILE)
    return path


def test_several_are_added_by_their_weights(file):
    rewards = find_rewards([f"{file}:length", f"{file}:exact"], [0.5, 2])
    columns = {"prompt": ["?", "?"], "answer": ["ab", "no"]}
    check_columns(rewards, tuple(columns))
    found = compute_rewards(rewards, ["ab", "abc"], columns)
    np.testing.assert_array_equal(found, [[2, 3], [1, 0]])
    np.testing.assert_array_equal(weighted_sum(rewards, found), [3, 1.5])
    assert rewards[0].digest == rewards[1].digest
    assert len(rewards[0].digest) == 64


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=9), st.integers(2, 40), st.randoms(use_true_random=False))
def test_answers_with_the_same_rewards_have_the_same_sum(rewards, count, random):
    """Anywhere in the batch and in any order: else a group of equal answers had advantages."""
    functions = [Reward(f"f{i}", len, 0.3, "") for i in range(len(rewards))]
    sums = weighted_sum(functions, np.array([random.sample(rewards, len(rewards)) for _ in range(count)]).T)
    assert len(set(sums.tolist())) == 1
    weights = [Reward(f"f{i}", len, random.uniform(-1, 1), "") for i in range(len(rewards))]
    assert len(set(weighted_sum(weights, np.repeat([rewards], count, axis=0).T).tolist())) == 1


def test_what_one_changes_in_its_lists_is_not_changed_for_others(file):
    rewards = find_rewards([f"{file}:vandal", f"{file}:length"])
    np.testing.assert_array_equal(compute_rewards(rewards, ["a", "bc"], {"x": [1, 2]}), [[0, 0], [1, 2]])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "fails",
            r"failed with ZeroDivisionError: division by zero \(.*mine.py, line 11, in inner: return 1 / len\(text\)\)$",
        ),
        ("short", "short returned 1 values for 2 answers; it must return a list of 2 numbers, one for each answer"),
        ("not_a_number", "not_a_number returned nan for the answer 'ab'; it must be a finite number"),
        ("nothing", "nothing returned None; it must return a list of 2 numbers"),
        ("leaves", r"leaves' failed with SystemExit: 0 \(.*mine.py, line .*, in leaves"),
        ("endless", "endless returned 3 values for 2 answers"),
        ("none", r"none' failed with TypeError: .*; call it as function\(completions, \*\*columns\)$"),
        ("refuses", r"refuses' failed with UserError: no judge \(.*mine.py, line .*, in refuses"),
    ],
)
def test_what_cannot_be_a_reward_is_an_error_of_one_line(file, name, message):
    with pytest.raises(TrainingError, match=message) as found:
        compute_rewards(find_rewards([f"{file}:{name}"]), ["ab", ""], {"prompt": ["?", "?"]})
    assert "\n" not in str(found.value)


def test_functions_that_are_not_there(file, tmp_path):
    for names, weights, message in (
        (["mine"], [], r"reward 'mine' is not FILE.py:FUNCTION"),
        ([f"{tmp_path}/absent.py:f"], [], r"absent.py does not exist"),
        ([f"{file}:number"], [], r"has no function 'number': it is not a function"),
        ([], [], r"pass one with --reward FILE.py:FUNCTION"),
        ([f"{file}:length", f"{file}:exact"], [1.0], r"weights=\[1.0\] has 1 for 2 rewards; pass one for each"),
    ):
        with pytest.raises(TrainingError, match=message):
            find_rewards(names, weights)
    for text, message in (
        ("import absent_module\n", "failed with ModuleNotFoundError: .*line 1"),
        ("import sys\nsys.exit(0)\n", "failed with SystemExit: 0 .*line 2"),
    ):
        broken = tmp_path / "broken.py"
        broken.write_text(text)
        with pytest.raises(TrainingError, match=message):
            find_rewards([f"{broken}:f"])


def test_the_columns_are_what_the_function_takes(file):
    with pytest.raises(TrainingError, match=r"exact cannot be called as .*missing a required argument: 'answer'"):
        check_columns(find_rewards([f"{file}:exact"]), ("prompt",))
    with pytest.raises(TrainingError, match=r"only cannot be called .*; write it as def f\(completions, \*\*columns\), and"):
        check_columns(find_rewards([f"{file}:only"]), ("prompt",))
    with pytest.raises(TrainingError, match="a field 'completions', which is the name of the answers; rename it"):
        check_columns(find_rewards([f"{file}:length"]), ("prompt", "completions"))


def test_who_asks_is_told_which_answers_ended(tmp_path):
    path = tmp_path / "ends.py"
    path.write_text(
        "def named(completions, stopped):\n    return list(map(float, stopped))\n"
        "def any_name(completions, **columns):\n    return list(map(float, columns['stopped']))\n"
        "def not_asking(completions):\n    return [0.5 for _ in completions]\n"
    )
    rewards = find_rewards([f"{path}:{name}" for name in ("named", "any_name", "not_asking")])
    check_columns(rewards, ())
    found = compute_rewards(rewards, ["a", "b"], {"stopped": [True, False]})
    np.testing.assert_array_equal(found, [[1, 0], [1, 0], [0.5, 0.5]])
    with pytest.raises(
        TrainingError, match="a field 'stopped', which is whether an answer ended before the limit; rename it"
    ):
        check_columns(rewards, ("stopped",))


def test_a_file_may_import_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_judge.py").write_text("N = 7.0\n")
    (tmp_path / "judge.py").write_text("from beside_judge import N\n\ndef seven(c, **_):\n    return [N for _ in c]\n")
    before = list(sys.path)
    [reward] = find_rewards([f"{tmp_path / 'judge.py'}:seven"])
    assert sys.path == before
    assert compute_rewards([reward], ["a"], {}).tolist() == [[7]]
