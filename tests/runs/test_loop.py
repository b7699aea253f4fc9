"""The loop: exact resume, on any devices, and what it says when it cannot go on."""

import json
import shutil
import signal
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from mortal_run import recipe, write_words
from running import StopAt, caches, lines, same  # noqa: F401  # caches is a fixture

import llama_jax
from llama_jax.data import DocumentFormat
from llama_jax.data.data_files import find_data
from llama_jax.errors import TrainingError
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.runs.log import Log, duration
from llama_jax.runs.loop import train
from llama_jax.runs.run_folder import lock_run
from llama_jax.runs.tasks.interface import TaskInputs
from llama_jax.runs.tasks.language_modeling import read_data
from llama_jax.tokenizers.sentencepiece import byte_tokenizer
from llama_jax.training.optimizer import OptimizerSettings

RECIPE = replace(recipe(), steps=12, evaluate_every=6, save_every=6, log_every=4)
CONFIG = RECIPE.model


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    file = write_words(tmp_path_factory.mktemp("text"))
    file.with_name("other.txt").write_text(" ".join(file.read_text().split()[::-1][:200]))
    return file


def test_a_text_without_separators_gives_its_share_to_validation_and_no_more(text):
    """Of two documents one was kept: half of the text, of which a tenth was asked for."""
    recipe = replace(RECIPE, reading=DocumentFormat(longest=3000), validation=0.1)
    corpora = read_data(recipe, TaskInputs(find_data([text]), (), byte_tokenizer(), MeshSizes(), Log(quiet=True)))
    (training,), ((_, held, _),) = corpora.train.values(), corpora.validation
    assert training.document_count == 2
    total = training.token_count + held.token_count
    assert corpora.validation_share == pytest.approx(0.1, abs=1e-3)
    assert held.token_count == pytest.approx(0.1 * total, abs=1)
    assert training.byte_count + held.byte_count == len(" ".join(text.read_text().split())) - 1


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory):
    """A run without interruption: (folder, result, what was said)."""
    folder, log = tmp_path_factory.mktemp("whole"), StopAt()
    recipe = replace(RECIPE, prompts=("the ",), sample_tokens=4)  # which changes nothing of what is trained
    return folder, train(recipe, folder, [text], log=log), log.said


def test_a_run_from_beginning_to_end(whole):
    folder, result, said = whole
    assert (result.step, result.stopped) == (12, None)
    losses = [line["loss"] for line in lines(folder, "train")]
    assert [line["step"] for line in lines(folder, "train")] == [4, 8, 12]
    assert losses[-1] < 0.9 * losses[0]
    (first, last) = lines(folder, "validation")
    assert last["loss"] == result.validation.loss < first["loss"]
    assert lines(folder, "train")[-1]["mfu"] is None  # of a CPU no peak is published
    assert lines(folder, "sample")[0]["text"].startswith("the ")
    assert "step 12/12 · loss " in said
    assert "done: step 12, validation loss" in said
    assert json.loads((folder / "recipe.json").read_text())["steps"] == 12


def test_the_folder_is_a_model(whole):
    """`load` gives the moving average, the tokenizer and the configuration, and the model continues a text."""
    folder, result, _ = whole
    config, params, tokenizer = llama_jax.load(folder)
    assert config == CONFIG
    same(params, result.state.ema)
    (continued,) = llama_jax.generate(config, params, [tokenizer.encode("the lla")], max_new_tokens=4)
    assert len(continued.tokens) == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_stopped_and_resumed_is_bit_for_bit_the_whole(whole, text, tmp_path, number):
    log = StopAt("step 4/", number)
    stopped = train(RECIPE, tmp_path, [text], log=log)
    assert stopped.stopped == signal.Signals(number).name
    assert 4 <= stopped.step < 12
    assert f"stopped and saved at step {stopped.step}; continue with --resume" in log.said
    resumed = train(RECIPE, tmp_path, [text], resume=True, log=StopAt())
    same(resumed.state, whole[1].state)
    assert [line["event"] for line in lines(tmp_path, "event")][:2] == ["start", "save"]
    assert lines(tmp_path, "train")[-1]["tokens"] == lines(whole[0], "train")[-1]["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "backend"),
    [
        pytest.param(MeshSizes(data=8), "jit", id="data", marks=pytest.mark.nightly),
        pytest.param(MeshSizes(fsdp=4, tensor=2), "jit", id="fsdp-tensor"),
        pytest.param(MeshSizes(data=2, context=4), "jit", id="context", marks=pytest.mark.nightly),
        pytest.param(MeshSizes(data=8), "pmap", id="pmap"),
    ],
)
def test_other_devices_go_on_with_the_same_run(whole, text, tmp_path, mesh, backend):
    """From one device to eight and back: the same data, the same loss to 1e-5."""
    stops = StopAt("step 4/")
    step = train(RECIPE, tmp_path, [text], mesh=mesh, backend=backend, log=stops).step
    assert f"s for {'pmap over 8 devices' if backend == 'pmap' else f'mesh {mesh}'}" in stops.said
    result = train(RECIPE, tmp_path, [text], resume=True, log=StopAt())
    assert result.step == 12 > step
    for found, expected in zip(lines(tmp_path, "train")[-1:], lines(whole[0], "train")[-1:], strict=True):
        assert found["tokens"] == expected["tokens"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "backend"), [(MeshSizes(fsdp=8), "jit"), (MeshSizes(data=2, fsdp=2), "jit"), (MeshSizes(8), "pmap")]
)
def test_an_exact_run_has_the_same_bits_on_any_devices(exact, text, tmp_path, mesh, backend):
    """From these devices to two others, against one device all the time."""
    recipe, folder, result = exact
    step = train(recipe, tmp_path, [text], mesh=mesh, backend=backend, log=StopAt("step 4/")).step
    assert 4 <= step < 12
    found = train(recipe, tmp_path, [text], mesh=MeshSizes(data=2), resume=True, log=StopAt())
    same(found.state, result.state)
    losses, expected = ([(x["step"], x["loss"], x["grad_norm"]) for x in lines(f, "train")] for f in (tmp_path, folder))
    assert losses == expected


@pytest.fixture(scope="module")
def exact(text, tmp_path_factory):
    recipe, folder = replace(RECIPE, exact=True, log_every=1), tmp_path_factory.mktemp("exact")
    return recipe, folder, train(recipe, folder, [text], log=StopAt())


def test_another_run_in_the_folder(whole, text):
    folder = whole[0]
    with pytest.raises(TrainingError, match="holds a run that is at step 12; continue with --resume"):
        train(RECIPE, folder, [text], log=StopAt())
    other = replace(RECIPE, steps=20, model=replace(CONFIG, hidden_dim=96))
    with pytest.raises(TrainingError, match=r"model\.hidden_dim: 64 in the folder, 96 now; steps: 12 in the folder, 20 now"):
        train(other, folder, [text], resume=True, log=StopAt())


@pytest.mark.slow
def test_a_run_is_prolonged_where_its_learning_rate_went_the_same(text, tmp_path):
    """As with the stable part of warm-up, stable, decay; a cosine would have fallen otherwise."""
    constant = replace(RECIPE.optimizer, schedule="constant")
    short = replace(RECIPE, steps=3, optimizer=constant)
    train(short, tmp_path, [text], log=StopAt())
    decaying = replace(RECIPE.optimizer, schedule="wsd")
    log = StopAt()
    result = train(replace(RECIPE, steps=5, optimizer=decaying), tmp_path, [text], resume=True, log=log)
    assert result.step == 5
    assert "resumed at step 3" in log.said
    with pytest.raises(TrainingError, match=r"steps: 5 in the folder, 9 now.*must have optimizer\.schedule=constant,.*wsd"):
        train(replace(RECIPE, steps=9, optimizer=decaying), tmp_path, [text], resume=True, log=StopAt())


@pytest.mark.slow
def test_a_path_alone_a_recipe_by_name_and_nothing_printed(text, tmp_path, capfd):
    """As a first script has it: no list around the path, and no line that nobody asked for."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\nfrom test_loop import RECIPE\ndef few(): return replace(RECIPE, steps=3)\n"
    )
    name = f"{tmp_path / 'mine.py'}:few"
    result = train(name, tmp_path / "run", str(text), validation_data=text.with_name("other.txt"))
    assert result.step == 3
    assert result.validation.numbers["bits_per_byte"] > 0
    assert capfd.readouterr() == ("", "")
    with pytest.raises(TrainingError, match="no recipe 'tinny'; use tiny, shakespeare"):
        train("tinny", tmp_path / "none", text)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("there", [False, True])
def test_a_refused_run_leaves_what_was_there_and_nothing_else(there, tmp_path):
    single = tmp_path / "short.txt"
    single.write_text("one two three")
    folder = tmp_path / "a" / "b"
    if there:
        folder.mkdir(parents=True)
        (folder / "notes.txt").write_text("mine")
    with pytest.raises(TrainingError, match="single document"):
        train(RECIPE, folder, single)
    assert (tmp_path / "a").exists() == there
    assert not there or [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_a_run_leaves_the_folder_that_another_has_taken(text, tmp_path):
    folder = tmp_path / "run"
    with ExitStack() as second:

        def replaced():
            shutil.rmtree(folder)
            second.enter_context(lock_run(folder))

        with pytest.raises(TrainingError, match="is no longer the folder of this run"):
            train(replace(RECIPE, save_every=0), folder, [text], log=StopAt("step 4/", action=replaced))
        assert [path.name for path in folder.iterdir()] == ["lock"]


def test_other_data_on_resume(whole, tmp_path):
    (tmp_path / "other.txt").write_text("another text " * 300)
    with pytest.raises(TrainingError, match="the train data is not what this run began with"):
        train(RECIPE, whole[0], [tmp_path / "other.txt"], resume=True, log=StopAt())


@pytest.mark.slow
def test_weights_are_extended_by_a_recipe_that_differs_in_that_alone(whole, text, tmp_path):
    """Its rope scaling and context are the recipe's, and the first loss shows that the parameters came along."""
    scaling = llama_jax.RopeScaling("yarn", 2.0, original_max_seq_len=CONFIG.max_seq_len)
    longer = replace(CONFIG, max_seq_len=2 * CONFIG.max_seq_len, rope_scaling=scaling)
    length = CONFIG.max_seq_len + 8
    recipe = replace(RECIPE, steps=1, log_every=1, model=longer, length=length, optimizer=OptimizerSettings())
    train(recipe, tmp_path, [text], weights=whole[0], log=StopAt())
    assert llama_jax.load(tmp_path).config == longer
    random = np.log(CONFIG.vocab_size)
    assert lines(tmp_path, "train")[0]["loss"] < (random + whole[1].validation.loss) / 2


def test_a_loss_that_stays_infinite_ends_the_run(text, tmp_path):
    recipe = replace(RECIPE, skip_limit=3, optimizer=OptimizerSettings(learning_rate=1e30, clip_norm=0, schedule="constant"))
    with pytest.raises(
        TrainingError, match=r"not finite for 3 steps in a row, the last of them step (\d+), which reads batch"
    ):
        train(recipe, tmp_path, [text], log=StopAt())


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"mesh": MeshSizes(data=3)}, "batch=8 cannot be split over"),
        ({}, {"mesh": MeshSizes(data=16)}, "needs 16 devices, but there are 8"),
        ({}, {"mesh": MeshSizes(fsdp=2), "backend": "pmap"}, "pmap copies the whole model"),
        ({"accumulate": 4}, {"mesh": MeshSizes(data=4), "backend": "pmap"}, "batch=8 must be a multiple of data=4 times"),
        ({}, {"validation_data": "missing.txt"}, "missing.txt does not exist"),
        ({"vocabulary": "given"}, {}, "needs a tokenizer; pass one with --tokenizer"),
        ({}, {"trace": range(90, 100)}, "trace=90:100 must lie within the run's steps, 1 to 12"),
    ],
)
def test_what_is_quick_to_check_comes_before_a_vocabulary(text, tmp_path, changes, options, message):
    log = StopAt()
    with pytest.raises(llama_jax.UserError, match=message):
        train(replace(RECIPE, **{"vocabulary": "bpe"} | changes), tmp_path / "run", [text], log=log, **options)
    assert log.said == ""
    assert not (tmp_path / "run").exists()


def test_a_file_in_the_place_of_the_folder(text):
    with pytest.raises(TrainingError, match="a file is where a folder is needed"):
        train(RECIPE, text, [text], log=StopAt())


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s"), (99, "99 s"), (100, "2 min"), (5940, "99 min"), (6000, "1 h 40 min"), (200_000, "2 d 7 h")],
)
def test_how_long(seconds, words):
    assert duration(seconds) == words
