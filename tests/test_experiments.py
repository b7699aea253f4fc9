"""The studies run from end to end, small, and write what they say."""

import json
from dataclasses import replace

import attack_serve
import context_extension
import finetune
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantization
import shakespeare
import soft_cap
import speedrun

import llama_jax

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
def test_context_extension(text, tmp_path):
    arguments = context_extension.Arguments("test", text, workdir=tmp_path / "runs", output=tmp_path / "found.json")
    context_extension.main(arguments)
    rows = json.loads(arguments.output.read_text())["found"]
    assert len(rows) == 1 + 2 * len(context_extension.WAYS)
    assert len({row["loss"] for row in rows if row["stage"] == "zero-shot"}) == 7  # every scaling does something


@pytest.mark.slow
@pytest.mark.rotating
def test_shakespeare(text, tmp_path):
    changes = ("steps=12", "optimizer.warmup_steps=2", "model.n_layers=1", "evaluate_tokens=2000", "log_every=4")
    shakespeare.main(shakespeare.Arguments(changes, text, tmp_path / "runs", tmp_path / "found.json"))
    runs = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert runs.keys() == shakespeare.RECIPES.keys()
    assert all(run["nats_per_byte"] < np.log(320) for run in runs.values())


@pytest.mark.slow
@pytest.mark.rotating
def test_quantization(tmp_path, monkeypatch):
    """The bundled model, on stories of its own."""
    monkeypatch.setattr(quantization, "DATA", tmp_path)
    monkeypatch.setattr(quantization, "WRITTEN", 2)
    output = tmp_path / "report.json"
    quantization.main(quantization.Arguments(formats=("float32", "int8", "q4_0"), tokens=300, output=output))
    rows = json.loads(output.read_text())["quality"]["bundled"]["kinds"]
    assert rows["float32"]["kl"] == 0 < rows["int8"]["kl"] < rows["q4_0"]["kl"]


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


def test_the_page_of_the_speedrun_has_the_results():
    page = speedrun.PAGE.read_text("utf-8")
    assert speedrun.with_tables(page, speedrun.tables(speedrun.read_rows(speedrun.ENTRIES))) == page
    for name, found in speedrun.TEXTS.items():
        assert f"| {name} | `{found}` |" in page
