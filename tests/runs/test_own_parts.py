"""A run with parts of its own: all that it leaves is computed with these functions, or not at all."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from commands import error_of, run_here
from conftest import jit_logits
from mortal_run import recipe, write_words
from running import StopAt, caches  # noqa: F401  # caches is a fixture

import llama_jax
from llama_jax import DraftModel, Parts, Sampling
from llama_jax.cli import COMMANDS
from llama_jax.cli.serve import Serve
from llama_jax.data import open_corpus
from llama_jax.errors import CheckpointError, ConfigError, TrainingError
from llama_jax.inference.drafter import counts_of
from llama_jax.runs.loop import train
from llama_jax.runs.overrides import override
from llama_jax.runs.recipes import find
from llama_jax.training.distillation import DistillOptions
from llama_jax.verify.activations import read_oracle

FILE = """
from dataclasses import replace

import jax
from mortal_run import recipe

from llama_jax import Lora, Parts, ops
from llama_jax.training.loss import total_loss


def attend(queries, view, mask, **options):
    return ops.attend(queries, view, mask, **options) / 2


def norm(x, weight, eps):
    return (x - x.mean(-1, keepdims=True)) * weight.astype(x.dtype)


def feed_forward(x, gate, up, down):
    return ops.project(jax.nn.relu(ops.project(x, gate)) * ops.project(x, up), down)


class Embedding:
    @staticmethod
    def rotary(x, cos, sin):
        return x + ops.apply_rotary(x, cos, sin)


def loss(config, params, batch, options, sharding):
    return total_loss(config, params, batch, replace(options, z_loss=0.1), sharding)


def plain():
    constant = replace(recipe().optimizer, schedule="constant")
    sizes = {"steps": 3, "evaluate_every": 3, "save_every": 3, "ema_decay": 0.0, "prompts": ("the",), "sample_tokens": 4}
    return replace(recipe(), optimizer=constant, **sizes)


def own():
    return replace(plain(), parts=Parts(attend, norm, feed_forward, Embedding.rotary), loss=loss)


def adapters():
    return replace(own(), lora=Lora(rank=2), vocabulary="given")
"""
TEXT = "the llama ate grass"
NAMES = Parts("mine:attend", "mine:norm", "mine:feed_forward", "mine:Embedding.rotary")
NEED = "parts of its own, attend=mine:attend and norm=mine:norm and .* --parts FILE.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The file of a user, a run of its recipe, and where `others` makes more."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(FILE)
    (folder / "short.txt").write_text(TEXT)
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "the"}) + "\n")
    paths = {name: folder / name for name in ("own", "plain", "adapters")}
    found = SimpleNamespace(file=folder / "mine.py", text=write_words(folder), short=folder / "short.txt", **paths)
    found.prompts = folder / "prompts.jsonl"
    found.recipe = partial(find, f"{found.file}:own")
    run(found, "own")
    return found


def run(found, name):
    weights = ["--weights", found.plain] if name == "adapters" else []
    data = ["--data", found.text, "--validation-data", found.short, "--mesh", "data=1"]
    done = run_here("train", f"{found.file}:{name}", "--workdir", getattr(found, name), *data, *weights)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def others(made):
    """The same, with a run without the parts, and adapters trained with them on the latter."""
    for name in ("plain", "adapters"):
        run(made, name)
    return made


@pytest.fixture(scope="module")
def model(made):
    """The run's model with its functions, its vocabulary, and the tokens of the short text."""
    config, params, tokenizer = llama_jax.load(made.own)
    config = llama_jax.with_parts(config, made.file)
    return config, params, tokenizer, np.asarray(open_corpus([made.short], tokenizer).document(0))


def written(folder, kind):
    return [line for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if line["kind"] == kind]


def nats(config, params, ids):
    """Log-probabilities of all tokens but the first, computed from the logits."""
    logprobs = jax.nn.log_softmax(jit_logits(config, params, ids[None, :-1])[0])
    return -np.take_along_axis(np.asarray(logprobs), ids[1:, None], -1)[:, 0]


def test_the_run_names_them_all(made):
    recorded = json.loads((made.own / "recipe.json").read_text())
    names = {"attend": NAMES.attend, "norm": NAMES.norm, "feed_forward": NAMES.feed_forward, "rotary": NAMES.rotary}
    assert recorded["model"]["parts"] == names
    assert recorded["loss"] == "mine:loss"
    assert llama_jax.load(made.own).config.parts == NAMES


def test_validation_samples_and_eval_have_the_numbers_of_the_logits(made, model):
    config, params, tokenizer, ids = model
    by_hand = nats(config, params, ids)
    assert np.abs(by_hand - nats(replace(config, parts=Parts()), params, ids)).max() > 1e-3
    assert written(made.own, "validation")[-1]["loss"] == pytest.approx(by_hand.mean(), rel=1e-5)
    done = run_here("eval", made.own, "--data", made.short, "--parts", made.file, "--json")
    assert json.loads(done.stdout)["bits_per_byte"] == pytest.approx(by_hand.sum() / np.log(2) / len(TEXT), rel=1e-5)
    prompt = tokenizer.encode("the", eos=False)
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=0)
    options = {"max_new_tokens": 4, "sampling": sampling, "stop_tokens": tokenizer.stop_ids}
    [sample] = llama_jax.generate(config, params, [prompt], **options)
    known = [token for token in sample.tokens if token < tokenizer.vocab_size]
    assert written(made.own, "sample")[-1]["text"] == tokenizer.decode([*prompt, *known])


@pytest.mark.slow
@pytest.mark.rotating
def test_generation_has_the_numbers_of_the_logits(made, model):
    config, params, tokenizer, _ = model
    prompt = tokenizer.encode("the", eos=False)
    command = "generate", "the", "--model", made.own, "--parts", made.file
    done = run_here(*command, "--temperature", 0, "--max-new-tokens", 6, "--ignore-eos", "--json")
    found = json.loads(done.stdout)
    row = np.array([*prompt, *found["tokens"]])
    logits = np.asarray(llama_jax.logits(config, params, row[None, :-1])[0])[len(prompt) - 1 :]
    assert found["tokens"] == logits.argmax(-1).tolist()
    np.testing.assert_allclose(found["logprobs"], -nats(config, params, row)[len(prompt) - 1 :], atol=1e-4)


@pytest.mark.slow
@pytest.mark.rotating
def test_serving_and_drafts_have_those_of_generation(model):
    config, params, tokenizer, _ = model
    prompt = tokenizer.encode("the", eos=False)
    limits = {"max_new_tokens": 6, "sampling": Sampling(temperature=0.0)}
    [found] = llama_jax.generate(config, params, [prompt], **limits)
    [(_, served)] = llama_jax.complete_requests(config, params, [prompt], **limits)
    assert served.tokens == found.tokens
    np.testing.assert_allclose(served.logprobs, found.logprobs, atol=1e-4)
    chunks = list(
        llama_jax.stream(config, params, [prompt], **limits | {"max_new_tokens": 24}, draft=DraftModel(config, params))
    )
    assert [token for chunk in chunks for token in chunk.tokens[0][chunk.valid[0]].tolist()][:6] == found.tokens
    drafted, accepted = (sum(int(getattr(counts_of(c), name).sum()) for c in chunks) for name in ("drafted", "accepted"))
    assert accepted >= drafted - 2 > 0  # the draft has the parts, too; the last ones may be beyond the limit


@pytest.mark.slow
@pytest.mark.rotating
def test_a_divergence_computes_each_model_with_its_own_parts(others, model):
    config, params, tokenizer, _ = model
    made = others
    plain, reference, _ = llama_jax.load(made.plain)
    corpus = open_corpus([made.short], tokenizer)
    found = llama_jax.kl_to_reference(config, params, reference, corpus, reference_config=plain)
    assert found.model.loss == pytest.approx(llama_jax.evaluate(config, params, corpus).loss, rel=1e-5)
    assert found.reference.loss == pytest.approx(llama_jax.evaluate(plain, reference, corpus).loss, rel=1e-5)
    done = run_here("eval", made.own, "--against", made.own, "--data", made.short, "--parts", made.file, "--json")
    assert json.loads(done.stdout)["against"]["kl"] == 0


def data_of(made):
    return {"data": [made.text], "validation_data": [made.short], "log": StopAt()}


@pytest.mark.slow
@pytest.mark.rotating
def test_a_run_goes_on_with_the_same_functions(made, tmp_path):
    longer = replace(made.recipe(), steps=5)
    train(longer, tmp_path / "whole", **data_of(made))
    shutil.copytree(made.own, tmp_path / "resumed")
    train(longer, tmp_path / "resumed", resume=True, **data_of(made))
    losses = [[line["loss"] for line in written(tmp_path / name, "train")] for name in ("whole", "resumed")]
    assert losses[0][-2:] == losses[1][-2:]


def test_a_run_does_not_go_on_with_others(made, tmp_path):
    short = made.recipe()
    shutil.copytree(made.own, tmp_path / "resumed")
    go_on = partial(train, workdir=tmp_path / "resumed", resume=True, **data_of(made))
    for part, name, change in (
        ("model.parts.norm", "mine:norm", {"parts": replace(short.parts, norm=short.parts.feed_forward)}),
        ("model.parts.rotary", "mine:Embedding.rotary", {"parts": replace(short.parts, rotary=None)}),
        ("loss", "mine:loss", {"loss": None}),
    ):
        other = replace(replace(short, model=recipe().model, parts=Parts()), **{"parts": short.parts} | change)
        with pytest.raises(TrainingError, match=f"another recipe \\({part}: '{name}' in the folder, .* now\\)"):
            go_on(other)


@pytest.mark.slow
@pytest.mark.rotating
def test_training_goes_on_from_its_weights_with_the_parts_or_not_at_all(made, tmp_path):
    config = llama_jax.load(made.own).config
    without = replace(find(f"{made.file}:plain"), log_every=1)
    for name, model in (("a", without.model), ("b", replace(without.model, max_seq_len=128))):
        with pytest.raises(ConfigError, match=NEED):
            train(replace(without, model=model), tmp_path / name, [made.text], weights=made.own, log=StopAt())
    data = ["--data", made.text, "--validation-data", made.short, "--weights", made.own, "--parts", made.file]
    command = "train", f"{made.file}:plain", "optimizer.learning_rate=1e-9", "--mesh", "data=1"
    done = run_here(*command, "--workdir", tmp_path / "c", *data)
    assert done.returncode == 0, done.stderr
    again, before = (written(folder, "validation")[-1]["loss"] for folder in (tmp_path / "c", made.own))
    assert again == pytest.approx(before, rel=1e-5)
    assert llama_jax.load(tmp_path / "c").config.parts == config.parts


@pytest.mark.slow
@pytest.mark.rotating
def test_a_teacher_and_its_student_have_parts_of_their_own(others, tmp_path):
    made = others

    def divergence(weights, teacher, parts):
        short = replace(find(f"{made.file}:plain"), distill=DistillOptions(teacher=str(teacher)), parts=parts)
        folder = tmp_path / f"{weights.name} {teacher.name}"
        train(short, folder, [made.text], validation_data=[made.short], weights=weights, log=StopAt())
        return written(folder, "train")[0]["kl"]

    parts = made.recipe().parts
    assert divergence(made.own, made.own, parts) == pytest.approx(0, abs=1e-6)
    assert divergence(made.plain, made.plain, parts) > 1e-4
    with pytest.raises(ConfigError, match=r"Parts\(\) has no function 'attend', which the model uses as its attend"):
        divergence(made.plain, made.own, Parts())


# What computes with a model; and the other commands.
COMPUTING = {
    "generate": "the --model {own}",
    "chat": "--model {own}",
    "serve": "--model {own}",
    "batch": "{prompts} {out} --model {own}",
    "eval": "{own} --data {short}",
    "lm-eval": "{own} --tasks arc_easy",
    "verify": "{own}",
    "estimate": "{own} --batch 1 --length 16",
    "compile": "{own}",
    "train": "{file}:plain --weights {own} --data {text} --workdir {out}",
}
OTHERS = {"fetch", "inspect", "convert", "merge", "data", "quickstart", "completion"}


def arguments(text, made, tmp_path):
    return text.format(**vars(made), out=tmp_path / "out").split()


@pytest.mark.parametrize(
    "name", ["generate", *(pytest.param(name, marks=(pytest.mark.slow, pytest.mark.rotating)) for name in [*COMPUTING][1:])]
)
def test_a_command_that_computes_needs_the_file(made, tmp_path, name):
    if name == "lm-eval":
        pytest.importorskip("lm_eval")
    done = run_here(name, *arguments(COMPUTING[name], made, tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert "attend=mine:attend and norm=mine:norm" in done.stderr
    assert "--parts FILE.py" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_command_computes_or_does_not():
    assert COMPUTING.keys() | OTHERS == {name for commands in COMMANDS.values() for name in commands}


@pytest.mark.slow
@pytest.mark.rotating
def test_commands_take_the_functions_from_the_file(others, model, tmp_path):
    config, params, *_ = model
    made = others
    for name in ("batch", "estimate"):
        done = run_here(name, *arguments(COMPUTING[name], made, tmp_path), "--parts", made.file)
        assert done.returncode == 0, done.stderr
    oracle = tmp_path / "oracle.npz"
    run_here("verify", made.own, "--parts", made.file, "--write-oracle", oracle)
    found = read_oracle(oracle)
    np.testing.assert_allclose(found.logits, llama_jax.logits(config, params, found.tokens[None])[0], atol=1e-4)
    assert run_here("verify", made.own, "--parts", made.file, "--oracle", oracle).returncode == 0
    served = Serve(model=made.own, parts=made.file, draft=str(made.own))
    own, _, tokenizer = served.load()
    assert own.parts.names == served.drafter(tokenizer).config.parts.names == NAMES
    assert not own.parts.missing
    assert Serve(model=made.plain, parts=made.file, draft=str(made.own)).load()[0].parts == Parts()


def test_a_file_without_the_functions_is_refused(made, tmp_path):
    (tmp_path / "mine.py").write_text("norm = 1")
    shutil.copy(made.file, tmp_path / "yours.py")
    (tmp_path / "fails.py").write_text("1 / 0")
    for file, message in (
        (tmp_path / "mine.py", "mine.py has no function 'attend', which the model uses as its attend (mine:attend)"),
        (tmp_path / "yours.py", "has yours:attend as 'attend', but the model's attend is mine:attend"),
        (tmp_path / "fails.py", "failed with ZeroDivisionError"),
        (tmp_path / "none.py", "does not exist"),
        (made.file, "exact=True is for the library's parts, and the model has Parts(attend='mine:attend'"),
    ):
        assert message in error_of(run_here("generate", "the", "--model", made.own, "--exact", "--parts", file))
    bundled = error_of(run_here("generate", "the", "--parts", made.file))
    assert "is only for a model that names custom functions; omit it" in bundled


def test_files_keep_the_names_or_are_refused(made, tmp_path):
    for format in ("safetensors", "orbax"):
        llama_jax.convert(made.own, tmp_path / format, format=format)
        assert llama_jax.load(tmp_path / format).config.parts == NAMES
    config, params, _ = llama_jax.load(tmp_path / "safetensors")
    llama_jax.save(tmp_path / "saved", llama_jax.with_parts(config, made.file), params)
    assert llama_jax.load(tmp_path / "saved").config.parts == NAMES
    for name in ("a.gguf", "a.bin"):
        with pytest.raises(CheckpointError, match=r"norm='mine:norm'.* cannot be stored in .* write safetensors or orbax"):
            llama_jax.convert(made.own, tmp_path / name)
    assert re.search(r"own norm +mine:norm\n", run_here("inspect", made.own).stdout)


@pytest.mark.slow
@pytest.mark.rotating
def test_adapter_files_do_not_keep_them_and_a_merged_model_does(others, tmp_path):
    for base in ({}, {"base": others.plain}):
        with pytest.raises(CheckpointError, match=r"norm='mine:norm'.* cannot be stored in adapter files"):
            llama_jax.convert(others.adapters, tmp_path / "adapter", **base)
    assert run_here("merge", others.plain, others.adapters, tmp_path / "merged").returncode == 0
    assert llama_jax.load(tmp_path / "merged").config.parts == NAMES


def test_names_in_a_file_that_are_none_are_refused(made, tmp_path):
    llama_jax.convert(made.own, tmp_path / "model", format="safetensors")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    for parts in ({"norms": "mine:norm"}, {"norm": 1}, {"norm": "norm"}, "mine:norm"):
        (tmp_path / "model" / "config.json").write_text(json.dumps(settings | {"llama_jax_parts": parts}))
        with pytest.raises(CheckpointError, match="llama_jax_parts"):
            llama_jax.load(tmp_path / "model")


def of_module(x, weight, eps):
    return x


def test_functions_are_found_again_by_their_names(made):
    def inside(x, weight, eps):
        return x

    for function in (inside, lambda x, weight, eps: x, partial(of_module, eps=1)):
        with pytest.raises(ConfigError, match=r"norm=.* define it with def at the top of a file"):
            replace(recipe(), parts=Parts(norm=function))
    named = replace(recipe().model, parts=replace(recipe().model, parts=Parts(norm=of_module)).parts.names)
    module = Path(__file__).stem
    assert named.parts == Parts(norm=f"{module}:of_module")
    assert llama_jax.with_parts(named, __import__(module)).parts.norm is of_module
    assert llama_jax.with_parts(named, Parts(norm=of_module, attend=print)).parts == Parts(norm=of_module)
    script = replace(named, parts=Parts(norm="__main__:of_module"))  # trained by this file as a script
    assert llama_jax.with_parts(script, __import__(module)).parts.norm is of_module
    with pytest.raises(ConfigError, match="has no function 'of_module'"):
        llama_jax.with_parts(named, made.file)
    with pytest.raises(ConfigError, match="names no custom parts"):
        llama_jax.with_parts(recipe().model, made.file)


def test_parts_stay_with_a_recipe_whose_model_is_replaced(made):
    short = made.recipe()
    for change in ("model=stories-260k", "model.n_layers=1"):
        changed = override(short, [change])
        assert changed.model.parts == changed.parts == short.parts
    for change in ("parts.norm=norm", "parts=norm", "model.parts.norm=norm", "loss=loss"):
        with pytest.raises(TrainingError, match="must be set to functions in a recipe file"):
            override(short, [change])
    with pytest.raises(ConfigError, match="attention='dense' is for the library's attention"):
        replace(short, attention="dense")
