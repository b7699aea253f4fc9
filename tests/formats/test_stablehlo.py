"""Exported models: in a process without this library they continue prompts with the tokens of `generate`."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
import vocabularies
from adapters import random_adapters
from commands import environment, error_of, outcome, run_here
from family_models import SIBLINGS
from make_goldens import KINDS, ROPES

import llama_jax
from llama_jax import Parts, ops
from llama_jax.errors import CheckpointError, ConfigError, GenerationError
from llama_jax.formats import run_exported
from llama_jax.formats.loading import bundled
from llama_jax.formats.stablehlo import ExportedModel, check_exportable, export_model
from llama_jax.model.hooks import with_hooks
from llama_jax.model.lora import Lora, adapted
from llama_jax.model.multi_lora import adapter_table
from llama_jax.model.trees import quantize, unstack_layers

PROMPTS = [[1, 2, 3], [*range(3, 16)], [7]]
SAMPLED = {"temperature": [0.0, 0.8, 1.0], "seed": [1, 2, 3], "top_p": [1, 0.9, 1], "top_k": [0, 0, 9]}
SAMPLED["repetition_penalty"] = [1.3, 1.2, 1.0]
# In the process of the runner `import llama_jax` raises, wherever it is installed.
ALONE = (
    "import runpy, sys; sys.modules['llama_jax'] = None; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def continued_by(folder, *arguments) -> list[str]:
    """The lines that ``run.py`` prints in a process of its own."""
    command = [sys.executable, "-c", ALONE, str(folder / "run.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment(PYTHONPATH=""))
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def in_text(ids) -> str:
    return ",".join(map(str, ids))


@pytest.mark.parametrize("kind", ["sentencepiece", "bytes"])
def test_ids_of_a_models_padding_have_no_text(kind, tmp_path):
    encode, decode = run_exported.tokenizer(vocabularies.write(tmp_path, kind), [])
    assert decode([*encode("once"), 10_000]) == "once"


def check(folder, exported: ExportedModel, model, new, stop=(), **cache):
    """That the runner chooses the tokens of `generate`, greedily and by the settings of each row."""
    exported.save(folder)
    about = json.loads((folder / "export.json").read_text()) | {"stop": [*stop]}
    loaded = run_exported.load(folder)
    for settings in ({}, SAMPLED):
        wanted = llama_jax.generate(
            *model, PROMPTS, max_new_tokens=new, sampling=llama_jax.Sampling(**settings), stop_tokens=stop, **cache
        )
        assert run_exported.generate(about, loaded, PROMPTS, new, **settings) == [row.tokens for row in wanted]


@pytest.fixture
def export(tmp_path, monkeypatch):
    """Export a model, and check what runs."""
    monkeypatch.setenv("LLAMA_JAX_NATIVE", "off")  # whose kernels round activations to 8 bits for quantized weights

    def export(config, params, new=12, stop=(), **options):
        cache = {"cache": options["cache"]} if "cache" in options else {}
        exported = export_model(config, params, context=48, batch=3, chunk=8, platforms=("cpu",), **options)
        check(tmp_path / "out", exported, (config, params), new, stop, **cache)

    return export


def half(x, weight, eps):
    return ops.rms_norm(x, weight, eps) / 2


@pytest.mark.slow
@pytest.mark.rotating
def test_a_part_of_ones_own(export, models):
    config, params = models["gqa"]
    export(replace(config, parts=Parts(norm=half)), params)


def random_model(config, seed=0):
    return config, jax.tree.map(lambda x: 4 * x, llama_jax.init(config, jax.random.key(seed)))


@pytest.mark.supports("StableHLO", family="llama")
def test_prompts_of_several_chunks_greedy_and_sampled(export, models):
    config, params = models["gqa"]
    first = llama_jax.generate(config, params, PROMPTS, max_new_tokens=12)[0].tokens
    export(config, params, stop=(first[5],))


@pytest.mark.slow
@pytest.mark.supports("StableHLO")
@pytest.mark.parametrize("kind", ["mixtral", "gemma3_text", "llama4_text", "olmo3"])
def test_siblings(export, kind):
    export(*random_model(SIBLINGS[kind]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cache", [llama_jax.CacheOptions(dtype="int8"), llama_jax.CacheOptions(window=8, sinks=2)], ids=["int8", "window"]
)
def test_caches(export, models, cache):
    export(*models["gqa"], cache=cache)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4", "nf4", "q4_k"])
def test_quantized_weights(export, kind):
    config, params = random_model(replace(KINDS["gqa"], dim=256, hidden_dim=256, head_dim=64))
    export(config, quantize(params, kind))


@pytest.mark.slow
def test_an_adapter_beside_its_weights(export, models):
    (config, params), lora = models["gqa"], Lora(4)
    export(config, adapted(params, random_adapters(config, lora, seed=1), lora))


@pytest.mark.slow
def test_rope_that_depends_on_the_length(export):
    export(*random_model(replace(ROPES["dynamic"], max_seq_len=64)), new=24)


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    """The folder of the bundled model in float32, as the command writes it."""
    folder = tmp_path_factory.mktemp("exported") / "stories"
    done = run_here(
        "export", bundled(), folder, "--dtype", "float32", "--batch", "2", "--context", "256", "--platforms", "cpu"
    )
    assert done.returncode == 0
    assert "weights 9.6 MB, state 1.6 MB for 2 x 256 tokens, programs for cpu\n" in done.stderr
    return folder


@pytest.mark.slow
def test_without_this_library(stories):
    config, params, tokenizer = llama_jax.load(bundled(), "float32")
    texts = "Once upon a time", "The dog"
    prompts = [tokenizer.encode(text) for text in texts]
    wanted = llama_jax.generate(config, params, prompts, max_new_tokens=20, stop_tokens=tokenizer.stop_ids)
    assert continued_by(stories, "--max-new-tokens", 20, *texts) == [tokenizer.decode(row.tokens) for row in wanted]


GREEDY: dict = {}
NUCLEUS = {"temperature": 0.8, "seed": 3, "top_p": 0.9}


@pytest.mark.slow
@pytest.mark.parametrize("quantized", [None, "q4_0"])
def test_200_tokens(tmp_path, monkeypatch, quantized):
    model = llama_jax.load(bundled(), "float32", quantize=quantized)
    check_text(tmp_path / "out", monkeypatch, model, 200, ["Once upon a time", "Tom and"], GREEDY, NUCLEUS)


@pytest.mark.real
@pytest.mark.parametrize("dtype", ["float32", None])
def test_a_real_model(tmp_path, monkeypatch, smollm2, dtype):
    """None keeps its blocks of 4 bits, which both programs dequantize at every token, so there are few."""
    check_text(tmp_path / "out", monkeypatch, llama_jax.load(smollm2, dtype), 30, ["Once upon a time", "def f(x):"], GREEDY)


def check_text(folder, monkeypatch, model, new, texts, *settings):
    """That the tokens are those of `generate` without native kernels; ends of texts are tokens as any."""
    monkeypatch.setenv("LLAMA_JAX_NATIVE", "off")
    config, params, tokenizer = model
    export_model(config, params, context=256, batch=2).save(folder)
    prompts = [tokenizer.encode(text) for text in texts]
    for each in settings:
        sampling = llama_jax.Sampling(**each)
        wanted = llama_jax.generate(config, params, prompts, max_new_tokens=new, sampling=sampling)
        options = [word for name, value in each.items() for word in ("--" + name.replace("_", "-"), value)]
        found = continued_by(folder, "--max-new-tokens", new, *options, *map(in_text, prompts))
        assert found == [in_text(row.tokens) for row in wanted]


def test_the_program_is_described_and_portable(stories):
    """No custom call, no path of this machine, the state changed in place; names, shapes and types as `export.json` says."""
    about = json.loads((stories / "export.json").read_text())
    program = jax.export.deserialize(bytearray((stories / "decode.stablehlo").read_bytes()))
    text = program.mlir_module()
    assert "custom_call" not in text
    assert ".py" not in text
    described = [(tuple(each["shape"]), each["dtype"]) for each in about["arguments"]["decode"]]
    assert described == [(x.shape, str(x.dtype)) for x in program.in_avals]
    assert [(tuple(each["shape"]), each["dtype"]) for each in about["results"]] == [
        (x.shape, str(x.dtype)) for x in program.out_avals
    ]
    state = [each["name"] for each in about["results"]][:-1]
    assert text.count("tf.aliasing_output") == len(state) == 5
    assert not re.search(r"^\s*(import|from) llama_jax", (stories / "run.py").read_text(), re.MULTILINE)
    weights = sum(
        np.prod(x["shape"]) * np.dtype(x["dtype"]).itemsize
        for x in about["arguments"]["decode"]
        if x["name"].startswith("weights.")
    )
    assert weights == about["bytes"]["weights"] < (stories / "weights.safetensors").stat().st_size


def test_what_is_there_is_kept(stories, tmp_path):
    said = error_of(run_here("export", bundled(), stories))
    assert "exists; remove it, or replace it with --overwrite (overwrite=True)" in said
    (tmp_path / "notes.txt").touch()
    assert "contains other files (notes.txt)" in error_of(run_here("export", bundled(), tmp_path, "--overwrite"))


def test_no_room(models, tmp_path, monkeypatch):
    config, params = models["gqa"]
    exported = export_model(config, unstack_layers(params), context=16, platforms=("cpu",))  # as it is loaded for a GPU
    assert [x.shape for x in exported.weights.values()] == [x.shape for x in jax.tree.leaves(params)]
    monkeypatch.setattr("llama_jax.formats.stablehlo.free_bytes", lambda path: 1000)
    with pytest.raises(CheckpointError, match=r"/out needs 0.0 GB, but 0.0 GB are free; make room there"):
        exported.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context", "1000"], "context=1000 exceeds the model's context of 512; export at most that, or set a window"),
        (["--platforms", "cpu,mps"], "platforms='cpu,mps' must be some of cpu, cuda, rocm, tpu"),
        (["--batch", "0"], "batch=0"),
    ],
)
def test_errors_of_the_command(tmp_path, arguments, message):
    code, out, said = outcome("export", bundled(), tmp_path / "out", *arguments)
    assert (code, out) == (2, "")
    assert message in said


def test_models_that_are_refused(models):
    config, params = models["gqa"]
    with pytest.raises(ConfigError, match="attend=mine:attend"):
        check_exportable(replace(config, parts=Parts(attend="mine:attend")), 16)
    with pytest.raises(ConfigError, match="hooks"):
        export_model(config, with_hooks(params, {"final": lambda value, at: (value, None)}), context=16)
    with pytest.raises(GenerationError, match=r"context=17: after 16 tokens the frequencies .* export at most 16"):
        check_exportable(ROPES["longrope"], 17)
    check_exportable(ROPES["longrope"], 16)
    lora = Lora(4)
    with pytest.raises(GenerationError, match="a table of adapters cannot be exported"):
        export_model(config, adapter_table(config, params, [(random_adapters(config, lora), lora)]))
