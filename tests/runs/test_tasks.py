"""Every kind of training: the same to the bit after an interruption, also on another day, and the same over devices."""

import json
from dataclasses import replace

import mortal_run
import numpy as np
import pytest
from commands import run_here
from running import (  # noqa: F401  # some are fixtures
    EAST,
    WEST,
    StopAt,
    caches,
    lines,
    same,
    text_fixture,
    write_dated_vocabulary,
    write_dialogs,
    zone_fixture,
)

from llama_jax.cli.eval import Eval
from llama_jax.data import ChatReading, DataError, open_chats, open_preferences
from llama_jax.data.rl_prompts import open_prompts
from llama_jax.formats.loading import bundled
from llama_jax.formats.step_dirs import CHECKPOINTS, read_metadata
from llama_jax.model.lora import Lora
from llama_jax.parallel.mesh import MeshSizes
from llama_jax.runs.loop import train
from llama_jax.tokenizers import load_tokenizer
from llama_jax.training.distillation import DistillOptions
from llama_jax.training.preference_loss import PreferenceOptions

TEXT = replace(mortal_run.recipe(), steps=4, length=40, vocabulary="given", evaluate_every=2, save_every=2, ema_decay=0.0)
CHATS = replace(TEXT, chats=ChatReading())
PAIRS = replace(mortal_run.preferring(), steps=4, save_every=2)
ADAPTERS = {"lora": Lora(rank=2, alpha=16.0), "vocabulary": "given"}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    return write_dated_vocabulary(tmp_path_factory.mktemp("tokens") / "vocabulary")


@pytest.fixture(scope="module")
def data(tmp_path_factory, text):
    """Files by what they hold."""
    folder = tmp_path_factory.mktemp("data")

    def said(role, content):
        return [{"role": role, "content": content}]

    rows = {"pairs": [], "judged": [], "prompts": []}
    for i in range(10, 50):
        ask = said("user", f"question {i}")
        rows["pairs"].append({"prompt": ask, "chosen": said("assistant", "yes"), "rejected": said("assistant", "no")})
        rows["judged"].append({"prompt": ask, "completion": said("assistant", "yes"), "label": i % 2 == 0})
        rows["prompts"].append({"prompt": ask})
    for name, some in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    files = {name: folder / f"{name}.jsonl" for name in rows}
    return files | {"chats": write_dialogs(folder / "dialogs.jsonl"), "text": text}


@pytest.fixture(scope="module")
def base(tmp_path_factory, vocabulary, data):
    """A model that others begin with, or learn from."""
    folder = tmp_path_factory.mktemp("base")
    train(replace(CHATS, steps=3, evaluate_every=0), folder, data["chats"], tokenizer=vocabulary, log=StopAt())
    return folder


@pytest.fixture(scope="module")
def tasks(base):
    """{name: (recipe, its data)}; a student begins with random numbers, the others with the base."""
    teacher = DistillOptions(str(base))
    return {
        "text with adapters": (replace(TEXT, **ADAPTERS, ema_decay=0.5), "text"),
        "chats": (CHATS, "chats"),
        "pairs": (PAIRS, "pairs"),
        "pairs with adapters": (replace(PAIRS, **ADAPTERS), "pairs"),
        "judged": (replace(PAIRS, preference=PreferenceOptions("kto", beta=0.5)), "judged"),
        "rewards": (replace(mortal_run.rewarding(), vocabulary="given", length=40), "prompts"),
        "teacher": (replace(CHATS, distill=teacher), "chats"),
        "teacher's first words": (replace(CHATS, distill=replace(teacher, top_k=4)), "chats"),
    }


@pytest.fixture(scope="module")
def trained(tasks, data, base):
    """The result of a run of a task, with changes of its recipe."""

    def run(task, folder, log=None, changes=(), **options):
        recipe, name = tasks[task]
        weights = None if recipe.distill else base
        return train(replace(recipe, **dict(changes)), folder, data[name], weights=weights, log=log or StopAt(), **options)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", ["text with adapters", "chats", "pairs", "pairs with adapters", "judged", "rewards", "teacher"]
)
def test_resumed_on_another_day_it_ends_with_the_same_bits(trained, tmp_path, zone, task):
    """Templates write the date, which stays that of the start; and of rewards two steps learn from the same answers."""
    zone(WEST)
    whole = trained(task, tmp_path / "whole")
    stopped = trained(task, tmp_path / "resumed", StopAt("step 3/" if task == "rewards" else "step 2/"))
    assert stopped.step < whole.step
    assert stopped.step % 2 or task != "rewards"
    zone(EAST)
    resumed = trained(task, tmp_path / "resumed", resume=True)
    same(resumed.state, whole.state)
    (*_, actual), (*_, expected) = (lines(tmp_path / name, "validation") for name in ("resumed", "whole"))
    assert actual == expected
    for name in ("reward", "loss"):
        actual, expected = ([line.get(name) for line in lines(tmp_path / f, "train")] for f in ("resumed", "whole"))
        assert actual == expected


WAYS = {
    "alone": ({}, {}),
    "exact": ({"exact": True}, {"mesh": MeshSizes(data=4)}),
    "mesh": ({}, {"mesh": MeshSizes(fsdp=2, tensor=2)}),
    "parts": ({"accumulate": 2}, {"mesh": MeshSizes(data=2)}),
    "context": ({}, {"mesh": MeshSizes(context=2)}),
    "pmap": ({}, {"mesh": MeshSizes(data=2), "backend": "pmap"}),
}


SHORT = {"steps": 3, "save_every": 0}


@pytest.fixture(scope="module")
def alone(trained, tmp_path_factory):
    """The folder of a short run of a task on one device."""
    folders = {}

    def folder_of(task):
        if task not in folders:
            folders[task] = tmp_path_factory.mktemp("alone")
            trained(task, folders[task], changes=SHORT)
        return folders[task]

    return folder_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "way"),
    [
        *(("text with adapters", "mesh"), ("chats", "mesh"), ("chats", "pmap"), ("judged", "mesh"), ("judged", "parts")),
        *(("rewards", "mesh"), ("rewards", "parts"), ("teacher", "mesh"), ("teacher's first words", "context")),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (("pairs", "mesh"), ("pairs", "parts"))),
        *(pytest.param("pairs with adapters", way, marks=pytest.mark.nightly) for way in ("mesh", "parts")),
        *(pytest.param("teacher", way, marks=pytest.mark.nightly) for way in ("parts", "context")),
    ],
)
def test_over_devices_and_in_parts_the_same_is_learnt(trained, alone, tmp_path, task, way):
    changes, options = WAYS[way]
    trained(task, tmp_path, changes=SHORT | changes, **options)
    for kind in ("train", "validation"):
        actual, expected = (lines(folder, kind) for folder in (tmp_path, alone(task)))
        losses = [[line["loss"] for line in some] for some in (actual, expected)]
        np.testing.assert_allclose(*losses, rtol=1e-3 if task == "rewards" else 2e-4)
        assert [line.get("reward") for line in actual] == [line.get("reward") for line in expected], "the same answers"


SHAPE = "model.vocab_size=320 model.dim=16 model.n_layers=1 model.hidden_dim=32 model.n_heads=4 model.n_kv_heads=2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "dpo batch=8 length=40 remat=none lora.rank=2 preference.kind=ipo --weights {base} --data {pairs}",
            "40 of 40 examples",
        ),
        ("distill batch=8 length=24 distill.top_k=8 reading.longest=60 {shape} --teacher {base} --data {text}", "KL "),
        ("grpo batch=64 length=60 rewards.answer=16 --weights {bundled} --data {words} --reward {file}:letters", "reward "),
    ],
    ids=["dpo", "distill", "grpo"],
)
def test_the_command(base, data, tmp_path, line, said):
    words = tmp_path / "prompts.jsonl"
    words.write_text("".join(json.dumps({"prompt": f"Once {n}"}) + "\n" for n in range(40)))
    paths = data | {"base": base, "bundled": bundled(), "file": mortal_run.__file__, "shape": SHAPE, "words": words}
    common = ["steps=2", "dtype=float32", "optimizer.warmup_steps=1", "--workdir", tmp_path / "run"]
    done = run_here("train", *line.format(**paths).split(), *common)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert lines(tmp_path / "run", "train")[-1]["step"] == 2


def sizes_of(corpus):
    """How many tokens a document has, and how many of them are targets, where all have as many."""
    (size,) = set((corpus.stops - corpus.starts).tolist())
    return size, corpus.targets.sum() // corpus.document_count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "way"),
    [("text with adapters", "alone"), *(("chats", way) for way in ("alone", "pmap", "exact"))]
    + [(task, "alone") for task in ("pairs", "judged", "rewards", "teacher")],
)
def test_tokens_per_second_are_of_tokens_that_are_not_padding(trained, data, vocabulary, tmp_path, task, way):
    changes, options = WAYS[way]
    trained(task, tmp_path, changes=SHORT | {"evaluate_every": 0} | changes, **options)
    tokenizer, logged = load_tokenizer(vocabulary), lines(tmp_path, "train")
    size, targets = sizes_of(open_chats(data["chats"], tokenizer, 40).corpus)
    rejected, _ = sizes_of(open_preferences(data["pairs"], tokenizer, 40).rejected)
    prompt = len(open_prompts(data["prompts"], tokenizer, 40).ids[0])
    expected = {
        "text with adapters": [8 * 40] * 3,  # rows are full
        "pairs": [4 * (size + rejected)] * 3,
        "judged": [4 * size] * 3,
        "rewards": [32 * (prompt + line.get("length", 0)) for line in logged],
    }.get(task, [8 * size] * 3)  # the teacher reads them too, which does not count
    seconds = np.diff([0.0, *(line["seconds"] for line in logged)])
    np.testing.assert_allclose(seconds * [line["tokens_per_second"] for line in logged], expected, rtol=1e-3)
    if task == "chats":
        assert [line["tokens"] for line in logged] == [8 * targets * step for step in (1, 2, 3)]


@pytest.mark.slow
def test_an_evaluation_repeats_that_of_the_run_if_it_has_its_time(tmp_path, zone, vocabulary, data, calling):
    zone(WEST)
    held = write_dialogs(tmp_path / "held.jsonl", 8, "another")
    result = train(CHATS, tmp_path / "run", data["chats"], validation_data=held, tokenizer=vocabulary)
    recorded = read_metadata(tmp_path / "run" / CHECKPOINTS)["recipe"]["chats"]["template_time"]
    zone(EAST)
    evaluation = (Eval, tmp_path / "run", "--data", held, "--length", 40, "--json")
    dated, today = (json.loads(calling(*evaluation, *more).out) for more in (("--template-time", recorded), ()))
    assert dated["loss"] == pytest.approx(result.validation.loss, abs=1e-6)
    assert abs(today["loss"] - result.validation.loss) > 1e-5


def test_chats_with_a_given_time_are_the_same_anywhere(zone, vocabulary, data):
    tokenizer = load_tokenizer(vocabulary)
    digests = {}
    for name in (WEST, EAST):
        zone(name)
        for reading in (ChatReading(), ChatReading(template_time="2026-07-31T23:59:59")):
            digests[name, reading.template_time] = open_chats(data["chats"], tokenizer, 40, reading).corpus.digest
    assert digests[WEST, "2026-07-31T23:59:59"] == digests[EAST, "2026-07-31T23:59:59"]
    assert digests[WEST, None] != digests[EAST, None]
    with pytest.raises(DataError, match="template_time='tomorrow' must be a date or a time"):
        ChatReading(template_time="tomorrow")


def test_a_run_without_a_date_in_its_chats_records_none(tmp_path, data):
    plain = replace(CHATS, steps=3, chats=ChatReading("plain"), vocabulary="byte", evaluate_every=0)
    train(plain, tmp_path, data["chats"])
    assert read_metadata(tmp_path / CHECKPOINTS)["recipe"]["chats"]["template_time"] is None
