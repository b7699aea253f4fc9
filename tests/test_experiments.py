"""The studies run from end to end, small, and write what they say."""

import json
import time
from argparse import Namespace
from dataclasses import replace

import attack_serve
import context_extension
import finetune
import jax
import jax.numpy as jnp
import measuring
import numpy as np
import pytest
import quantization
import shakespeare
import soft_cap
import speedrun

import llama_jax
from llama_jax import ops
from llama_jax.formats.loading import bundled
from llama_jax.ops.attention import AttentionMask, KVView
from llama_jax.runs.overrides import override
from llama_jax.runs.signals import StopRequest

WORDS = "the lion and the mouse, said Lily; a tree in the garden of the king: who goes there? nobody, my lord."


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Forty thousand bytes of words in random order, in stories of a few lines."""
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(WORDS.split(), 12)) for _ in range(600)]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(line + ("\n<|endoftext|>\n" if i % 6 == 5 else "\n") for i, line in enumerate(lines)))
    return path


@pytest.mark.slow
@pytest.mark.rotating
def test_context_extension(text, tmp_path, capsys):
    arguments = context_extension.Arguments("test", text, workdir=tmp_path / "runs", output=tmp_path / "found.json")
    context_extension.main(arguments)
    found = json.loads(arguments.output.read_text())
    assert len(found["found"]) == 1 + 2 * len(context_extension.WAYS)
    assert all(0 < one["loss"] < 6 for one in found["found"])
    assert len({one["loss"] for one in found["found"] if one["stage"] == "zero-shot"}) == 7  # every scaling does something
    table = arguments.output.with_suffix(".md").read_text()
    assert all(f"| {way} |" in table for way in context_extension.WAYS)
    assert arguments.output.with_suffix(".png").stat().st_size > 10_000
    assert "zero-shot" in capsys.readouterr().out
    context_extension.main(arguments)  # of what is finished nothing runs again
    assert json.loads(arguments.output.read_text())["found"] == found["found"]
    with pytest.raises(SystemExit, match="belongs to a run with other settings"):
        context_extension.main(replace(arguments, seed=1))
    with pytest.raises(SystemExit, match="is too short"):
        context_extension.main(replace(arguments, size="cpu"))
    with pytest.raises(SystemExit, match="does not exist"):
        context_extension.main(replace(arguments, text=tmp_path / "none.txt", workdir=tmp_path / "other"))


@pytest.mark.slow
@pytest.mark.rotating
def test_shakespeare(text, tmp_path, capsys):
    changes = ("steps=12", "optimizer.warmup_steps=2", "model.n_layers=1", "evaluate_tokens=2000", "log_every=4")
    arguments = shakespeare.Arguments(changes, text, tmp_path / "runs", tmp_path / "found.json")
    shakespeare.main(arguments)
    found = json.loads(arguments.output.read_text())["runs"]
    assert found.keys() == shakespeare.RECIPES.keys()
    for run in found.values():
        assert run["nats_per_byte"] < np.log(320)
        assert run["sample"].startswith("ROMEO:")
    validation = (tmp_path / "runs" / "validation.txt").read_text()
    assert (tmp_path / "runs" / "training.txt").read_text() + validation == text.read_text()
    assert arguments.output.with_suffix(".png").stat().st_size > 10_000
    assert "nats per byte" in capsys.readouterr().out


@pytest.mark.parametrize("window", [None, 3])
def test_capped_attention_is_attention_where_scores_are_small(window):
    keys = jax.random.split(jax.random.key(0), 3)
    queries = jax.random.normal(keys[0], (2, 2, 8, 3, 4))
    view = KVView(*(jax.random.normal(key, (2, 2, 8, 4)) for key in keys[1:]))
    seen = AttentionMask.causal(8, jnp.array([[1] * 8, [1] * 3 + [2] * 5]))

    @jax.jit
    def found(scale):
        return [attend(scale * queries, view, seen, scale=1.0, window=window) for attend in (soft_cap.capped, ops.attend)]

    np.testing.assert_allclose(*found(0.1), atol=1e-3)
    capped, plain = found(100.0)
    assert np.abs(capped - plain).max() > 0.01


@pytest.mark.slow
@pytest.mark.rotating
def test_an_attention_of_ones_own_is_the_one_that_is_used():
    plain, prompt = llama_jax.preset("stories-260k"), [1, 7, 300]
    config = replace(plain, parts=llama_jax.Parts(attend=soft_cap.capped))
    params = llama_jax.init(config, jax.random.key(1))
    loud = params.blocks.replace(attention=params.blocks.attention.replace(qkv=40 * params.blocks.attention.qkv))
    params = params.replace(blocks=loud)  # scores beyond the cap
    [written] = llama_jax.generate(config, params, [prompt], max_new_tokens=6)
    row = jnp.array([prompt + written.tokens])
    hidden, _ = llama_jax.forward(config, params, row[:, :-1])
    logits = llama_jax.unembed(config, params, hidden)[0]
    assert written.tokens == logits.argmax(-1)[len(prompt) - 1 :].tolist()
    by_hand = -jnp.take_along_axis(jax.nn.log_softmax(logits), row[0, 1:, None], axis=-1).mean()
    batch = llama_jax.Batch(row)
    capped = llama_jax.next_token_loss(config, params, batch)
    np.testing.assert_allclose(capped, by_hand, rtol=1e-5)
    assert abs(capped - llama_jax.next_token_loss(plain, params, batch)) > 1e-3


def test_settings_name_no_path_of_a_machine(tmp_path):
    arguments = Namespace(output=measuring.ROOT / "experiments" / "results" / "x.json", data=tmp_path / "text.txt", steps=3)
    assert measuring.settings(arguments) == {"output": "experiments/results/x.json", "data": "text.txt", "steps": 3}


def test_reports_are_json_of_a_row_a_line_and_say_where_they_were_made(tmp_path):
    about = measuring.describe_run(Namespace(steps=3), "no-such-package")
    assert about["versions"]["jax"] == jax.__version__
    assert about["versions"]["no-such-package"] == "not installed"
    measuring.write_rows(tmp_path / "new" / "report.json", about, "rows", [{"a": 1}, {"a": [2]}])
    text = (tmp_path / "new" / "report.json").read_text()
    assert json.loads(text) == about | {"rows": [{"a": 1}, {"a": [2]}]}
    assert text.count("\n") == 4
    assert "cores" in measuring.devices()


def test_what_is_stored_is_not_made_again(tmp_path):
    first = measuring.once(tmp_path / "stage.json", lambda: {"loss": 2.0})
    assert measuring.once(tmp_path / "stage.json", lambda: 1 / 0) == first
    assert first.keys() == {"loss", "seconds"}


def test_a_text_that_is_not_there_is_said_in_a_line(tmp_path):
    with pytest.raises(SystemExit, match=r"plays\.txt cannot be read \(No such file or directory\); it is not part"):
        measuring.read_text(tmp_path / "plays.txt")


@pytest.mark.slow
@pytest.mark.rotating
def test_quantization(tmp_path, monkeypatch, capsys):
    """The bundled model on stories of its own, and then as a model of the user, whose results come first."""
    monkeypatch.setattr(quantization, "DATA", tmp_path)
    monkeypatch.setattr(quantization, "WRITTEN", 2)
    output = tmp_path / "report.json"
    arguments = quantization.Arguments(formats=("float32", "int8", "q4_0"), tokens=300, output=output)
    quantization.main(arguments)
    real = replace(arguments, model=bundled(), llama_cpp=())
    quantization.main(replace(real, formats=("int8",)))
    quantization.main(replace(real, formats=("q8_0",)))
    quality = json.loads(output.read_text())["quality"]
    assert list(quality) == [bundled().stem, "bundled"]
    assert list(quality[bundled().stem]["kinds"]) == ["int8", "q8_0"]
    assert quality["bundled"]["read"] == "stories of its own"
    rows = quality["bundled"]["kinds"]
    assert rows["float32"]["kl"] == 0 < rows["int8"]["kl"] < rows["q4_0"]["kl"]
    assert 0 < rows["int8"]["by_layer"][-1] < rows["q4_0"]["by_layer"][-1] < 1
    assert "| int8 |" in output.with_suffix(".md").read_text()
    assert output.with_suffix(".png").stat().st_size > 10_000
    assert "q4_0" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.rotating
def test_a_server_under_attack_gives_known_answers(tmp_path, monkeypatch):
    """`experiments/attack_serve.py`, small. Times mean nothing here, where other tests run at once."""
    monkeypatch.setattr(attack_serve, "REQUESTS", 24)
    monkeypatch.setattr(attack_serve, "GAP_MS", 1e9)
    monkeypatch.setattr(attack_serve, "END_SECONDS", 60)
    output = tmp_path / "report.json"
    arguments = attack_serve.Arguments(minutes=0.1, window=3, clients=8, attackers=1, rows=4, output=output)
    attack_serve.main(arguments)
    report = json.loads(output.read_text())
    assert report["failed"] == []
    assert report["without"]["tokens"] > 0 < report["with"]["tokens"]
    assert report["compilations after ready"] == 0
    assert sum(report["attackers"].values()) > 4


def test_answers_are_judged_by_whole_words_and_a_whole_end():
    answers = ["A bird in the Garden.", "A bird in the gardens.", "A bird in the garden", 'In the garden: "Bird!"']
    words = [["bird", "garden"]] * 4
    assert finetune.included(answers, words) == [1, 0.5, 1, 1]
    assert finetune.told(answers, words, prompt=[""] * 4) == [1, 0.5, 0, 1]
    shuffled = [finetune.shuffled([*answers, str(i)], [*words, ["lion"]]) for i in range(8)]
    assert all(sorted(rewards) == [0, 0, 0.5, 1, 1] for rewards in shuffled)
    assert shuffled[0] == finetune.shuffled([*answers, "0"], [*words, ["lion"]])
    assert len(set(map(tuple, shuffled))) > 1


@pytest.mark.slow
@pytest.mark.rotating
def test_finetune(tmp_path, capsys):
    arguments = finetune.Arguments((3,), "small", tmp_path / "runs", tmp_path / "found.json")
    finetune.main(arguments)
    [run] = json.loads(arguments.output.read_text())["runs"]
    for name in finetune.MODELS:
        assert 0 <= run[name]["success"] <= run[name]["ended"] <= 1
    assert run["dpo"]["held_pairs"] > 0
    for name in finetune.REWARDED:
        assert run[name]["curve"]["step"] == [1, 2, 3]
    first = [run[name]["curve"]["reward"][0] for name in finetune.REWARDED]
    assert first[0] == pytest.approx(first[1], rel=1e-12)  # the same answers, of the same model, in another order
    table = arguments.output.with_suffix(".md").read_text()
    assert "| 3 | grpo |" in table
    assert table.count("| no |") >= 2  # three steps teach nothing
    assert arguments.output.with_suffix(".png").stat().st_size > 10_000
    assert "shuffled" in capsys.readouterr().out
    before = arguments.output.read_text()
    finetune.main(arguments)  # of what is finished nothing runs again
    assert arguments.output.read_text() == before


SMALL_ENTRY = (
    *("model.dim=32", "model.n_heads=2", "model.n_kv_heads=2", "model.n_layers=1", "model.hidden_dim=64"),
    *("model.vocab_size=320", "model.max_seq_len=64", "batch=2", "length=32", "steps=4", "optimizer.warmup_steps=1"),
)


@pytest.fixture(scope="module")
def slices(tmp_path_factory):
    """Three files as the slices of TinyStories are: no end of a story looks the same."""
    folder, rng = tmp_path_factory.mktemp("slices"), np.random.default_rng(1)
    words = WORDS.replace("\n", " ").split()
    told = [f"Once upon a time {' '.join(rng.choice(words, 30))}.\n\n{' '.join(rng.choice(words, 20))}." for _ in range(90)]
    (folder / "tinystories-train.txt").write_text("\n".join(told[:40]))
    (folder / "tinystories-v2-train.txt").write_text("\n<|endoftext|>\n".join(told[40:80]).replace("\n\n", "\n"))
    (folder / "tinystories-valid.txt").write_text("\n\n".join(told[80:]))
    return folder


class Told:
    """A clock whose time the test sets."""

    left = 100.0


def test_as_many_steps_are_taken_as_fit_into_the_time():
    clock = Told()

    def rehearse(recipe, log):
        assert recipe.steps == speedrun.REHEARSED
        clock.left -= 10  # compilation and the like
        for step in range(1, recipe.steps + 1):
            clock.left -= 0.5
            if step == 1 or step % recipe.log_every == 0:
                log.progress("")

    found = speedrun.fit(speedrun.baseline(), rehearse, clock)
    assert (0.9 * (100 - 18 - 10)) / 0.5 < found.steps < (100 - 18 - 10) / 0.5
    assert found.optimizer.warmup_steps == min(speedrun.baseline().optimizer.warmup_steps, found.steps // 10)
    fixed = speedrun.with_steps(speedrun.baseline(), 7)
    assert speedrun.fit(fixed, rehearse, clock) is fixed
    clock.left = 18
    with pytest.raises(SystemExit, match="no step fits"):
        speedrun.fit(speedrun.baseline(), rehearse, clock)


@pytest.mark.parametrize("name", ["wall", "processor"])
def test_the_clock_asks_a_run_for_its_end(name):
    deadline = time.monotonic() + 60

    def wait(stop=None):
        while (stop is None or stop.name is None) and time.monotonic() < deadline:
            pass

    with StopRequest() as stop:
        stop.begin_steps()
        with speedrun.Clock(1e-4, name).stopping():
            wait(stop)
    assert stop.name == "SIGTERM"
    with pytest.raises(SystemExit, match="outside of training"), speedrun.Clock(1e-4, name).stopping():
        wait()


def test_what_was_tried_changes_our_entry():
    assert speedrun.h100().model.dim == 768
    for changes in speedrun.TRIED.values():
        assert override(speedrun.ours(), changes) != speedrun.ours()


def test_no_validation_story_is_trained_on(slices, tmp_path):
    text = speedrun.prepare(slices, tmp_path)
    assert text.changed == (text.training[0].name, text.validation.name)  # not the text of the rules
    assert len(list(speedrun.stories_of(text.training))) == 80
    for training in ((), (text.validation,)):
        other = tmp_path / "other"
        other.mkdir(exist_ok=True)
        for path in slices.iterdir():
            (other / path.name).write_bytes(path.read_bytes())
        (other / "tinystories-train.txt").write_bytes((slices / "tinystories-valid.txt").read_bytes())
        with pytest.raises(SystemExit, match="are in the training text"):
            speedrun.prepare(other, tmp_path / "again", training)


@pytest.mark.slow
@pytest.mark.rotating
def test_speedrun(slices, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speedrun, "use", lambda track: None)  # this process keeps its cores
    monkeypatch.setenv("LLAMA_JAX_CACHE", str(tmp_path))
    output = tmp_path / "found.json"
    practice = speedrun.Run("baseline", SMALL_ENTRY, minutes=60, data=slices, output=output)
    practice.run()
    assert "practice: not recorded" in capsys.readouterr().out
    assert not output.exists()
    replace(practice, changes=(*SMALL_ENTRY, "vocabulary=given"), name="baseline", idea=True).run()
    [row] = speedrun.read_rows(output)
    assert row["steps"] == row["planned"] == 4
    assert row["tokens"] == 4 * 2 * 32
    assert 0 < row["bits_per_byte"] < 8
    assert 0 < row["used"] < 60
    assert "| baseline | " in speedrun.tables([row])["ideas"]


def leaky(x, weight, eps):
    """A norm that tells each position of those after it."""
    return ops.rms_norm(x + x.mean(1, keepdims=True), weight, eps)


@pytest.mark.slow
@pytest.mark.rotating
def test_a_model_that_sees_what_comes_is_no_entry(slices, tmp_path):
    text = speedrun.prepare(slices, tmp_path)
    recipe = replace(override(speedrun.baseline(), SMALL_ENTRY), parts=llama_jax.Parts(norm=leaky))
    with pytest.raises(SystemExit, match="depend on the second half"):
        speedrun.attempt(recipe, text, speedrun.Clock(60, "wall"), tmp_path)


def test_the_page_of_the_speedrun_has_the_results():
    page = speedrun.PAGE.read_text("utf-8")
    assert speedrun.with_tables(page, speedrun.tables(speedrun.read_rows(speedrun.ENTRIES))) == page
    for name, found in speedrun.TEXTS.items():
        assert f"| {name} | `{found}` |" in page


def test_the_best_entry_stands_first_and_ideas_show_their_change():
    common = {"by": "A", "date": "2026-11-26", "device": "a CPU", "parameters": 2e6, "steps": 9, "tokens": 1e6, "used": 29.9}
    common |= {"minutes": 30.0, "clock": "wall"}
    row = lambda kind, name, bits: {"kind": kind, "name": name, "bits_per_byte": bits, **common}
    first, tried = next(iter(speedrun.IDEAS)), next(iter(speedrun.TRIED))
    rows = [row("cores", "one", 1.1), row("cores", "two", 1.0), row("h100", "three", 0.5)]
    rows += [row("idea", tried, 1.25), row("idea", first, 1.2), row("idea", "baseline", 1.5)]
    found = speedrun.tables(rows)
    assert [line.split(" | ")[2] for line in found["cores"].splitlines()[2:]] == ["two", "one"]
    assert "three" in found["h100"]
    assert f"| {first} | 1.2000 | -0.3000 | 9 |" in found["ideas"]
    assert f"| {tried} | 1.2500 | +0.0500 | 9 |" in found["ideas"]
