"""Eight simulated devices generate what one does, from a model that no device has whole."""

import functools
import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from conftest import sharp, tiny_config, write_hf_folder
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import llama_jax
from llama_jax import Parts, Sampling, ops
from llama_jax.errors import CheckpointError, MeshError
from llama_jax.formats import open_checkpoint
from llama_jax.formats.build_params import build_params, pad_to_mesh
from llama_jax.formats.lazy_tensors import Dense
from llama_jax.inference import compiled_decode as module
from llama_jax.inference import prepare_inputs, single_program
from llama_jax.inference.generate import to_generations
from llama_jax.inference.rollouts import RolloutOptions, RolloutPrompts, roll_out
from llama_jax.inference.sharding import sharding_of
from llama_jax.model.cache import CacheOptions
from llama_jax.model.forward import forward
from llama_jax.model.forward_options import ComputeOptions, unconstrained
from llama_jax.parallel import generation_sharding
from llama_jax.parallel.generation_sharding import param_shardings
from llama_jax.parallel.mesh import MeshSizes, make_mesh, parse_mesh
from llama_jax.parallel.padding import pad_params, padded_config
from llama_jax.parallel.pmap import pmap_generate, pmap_replicate
from llama_jax.runs.tasks.grpo import make_sampler

# Of four key/value heads tensor=8 makes eight, and 250 tokens become 256 rows.
CONFIG = tiny_config(vocab_size=250, n_heads=8, n_kv_heads=4, max_seq_len=128)
PROMPTS = [[1, 5, 7], [1], [9] * 17, list(range(40, 62))] * 2
# Four of eight rows are greedy, the others sample by every rule.
SAMPLING = Sampling(
    temperature=[0.0, 1.0, 0.0, 1.0, 0.0, 0.7, 0.0, 1.0],
    top_k=[0, 0, 0, 5, 0, 20, 0, 0],
    top_p=[1.0, 1.0, 1.0, 0.8, 1.0, 1.0, 1.0, 0.9],
    min_p=[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.02],
    repetition_penalty=[1.0, 1.0, 1.3, 1.0, 1.0, 1.1, 1.0, 1.0],
    seed=range(8),
)
NEW = 12


@pytest.fixture(scope="module")
def params():
    """Random, with sharp logits so that the order of a sum cannot turn an argmax over."""
    return sharp(CONFIG, jax.random.key(1))


@pytest.fixture(scope="module")
def alone(params):
    return llama_jax.generate(CONFIG, params, PROMPTS, max_new_tokens=NEW, sampling=SAMPLING)


@pytest.fixture(scope="module")
def folder(params, tmp_path_factory):
    """The model as Hugging Face writes it."""
    path = tmp_path_factory.mktemp("saved") / "model"
    llama_jax.save(path, CONFIG, params)
    return path


@pytest.fixture(scope="module")
def load(folder):
    """Configuration and parameters on a mesh, by its text."""
    found = {}

    def load(text):
        if text not in found:
            found[text] = llama_jax.load(folder, mesh=parse_mesh(text))[:2]
        return found[text]

    return load


def same(found, expected):
    assert [row.tokens for row in found] == [row.tokens for row in expected]
    for row, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(row.logprobs, other.logprobs, atol=1e-5)
        assert row.finish_reason == other.finish_reason


slow, nightly = pytest.mark.slow, pytest.mark.nightly


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("tensor=8", marks=slow),
        "data=2,fsdp=2,tensor=2",
        pytest.param("data=8", marks=nightly),
        pytest.param("fsdp=8", marks=nightly),
        pytest.param("data=2,fsdp=4", marks=slow),
        pytest.param("data=4,fsdp=2", marks=nightly),
        pytest.param("data=2,tensor=4", marks=nightly),
        pytest.param("data=4,tensor=2", marks=nightly),
        pytest.param("fsdp=2,tensor=4", marks=nightly),
        pytest.param("fsdp=4,tensor=2", marks=nightly),
    ],
)
def test_every_mesh_of_eight_generates_what_one_device_does(text, load, alone):
    config, params = load(text)
    assert params.embedding.sharding.num_devices == 8
    same(llama_jax.generate(config, params, PROMPTS, max_new_tokens=NEW, sampling=SAMPLING), alone)


def own_attention(queries, view, seen, **options):
    return ops.attend(queries, view, seen, **options)


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize(
    ("compute", "parts"),
    [(ComputeOptions(attention="dense"), Parts()), (ComputeOptions(), Parts(attend=own_attention))],
    ids=["dense", "own"],
)
def test_an_attention_that_knows_no_pages_reads_those_of_its_own_rows(load, alone, compute, parts):
    config, params = load("data=2,fsdp=2,tensor=2")
    config = replace(config, parts=parts)
    same(llama_jax.generate(config, params, PROMPTS, max_new_tokens=NEW, sampling=SAMPLING, compute=compute), alone)


def test_a_cache_needs_not_know_of_the_mesh(load, params):
    config, spread = load("data=2,fsdp=2,tensor=2")
    tokens = np.arange(8 * 20, dtype=np.int32).reshape(8, 20) % CONFIG.vocab_size
    read = jax.jit(forward, static_argnums=0, static_argnames="sharding")
    alone, _ = read(CONFIG, params, tokens, llama_jax.init_cache(CONFIG, 8, 40))
    found, _ = read(config, spread, tokens, llama_jax.init_cache(config, 8, 40), sharding=sharding_of(spread))
    np.testing.assert_allclose(found, alone, atol=1e-4)


# Rows, heads, and both: over the whole of the mesh each.
ROWS_OR_HEADS = ["data=4,fsdp=2", "tensor=8", "data=2,fsdp=2,tensor=2"]
REMEMBERING = {
    "window": {"window": 6},
    "sinks": {"window": 6, "sinks": 2},
    "int8": {"dtype": "int8"},
    "int8 sinks": {"dtype": "int8", "window": 6, "sinks": 2},
}


@pytest.fixture(scope="module")
def remembering(params):
    """What one device generates with a cache of a kind: so long that pages of a window are used again."""

    @functools.cache
    def run(kind):
        return llama_jax.generate(CONFIG, params, PROMPTS, **remembering_options(kind))

    return run


def remembering_options(kind):
    return {"max_new_tokens": 36, "sampling": SAMPLING, "cache": CacheOptions(**REMEMBERING[kind])}


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        pytest.param(
            text, kind, marks=[] if (text, kind) == (ROWS_OR_HEADS[2], "sinks") else slow if i == j % 3 else nightly
        )
        for i, text in enumerate(ROWS_OR_HEADS)
        for j, kind in enumerate(REMEMBERING)
    ],
)
def test_a_cache_that_remembers_less_is_divided_as_well(text, kind, load, remembering):
    found, expected = llama_jax.generate(*load(text), PROMPTS, **remembering_options(kind)), remembering(kind)
    assert [row.tokens for row in found] == [row.tokens for row in expected]


@pytest.mark.slow
def test_a_window_is_seen_in_what_is_generated(alone, remembering):
    """Else the test above could not find a cache that remembers all."""
    several = [[row.tokens[:NEW] for row in rows] for rows in (alone, remembering("window"), remembering("sinks"))]
    assert several[0] != several[1] != several[2] != several[0]


@pytest.mark.slow
@pytest.mark.parametrize("text", ROWS_OR_HEADS)
def test_groups_of_answers_are_those_of_one_device(text, params):
    """From parameters as a training over the mesh has them; prompts of several pages, which the answers of a group share."""
    rng, sizes = np.random.default_rng(0), parse_mesh(text)
    lengths = np.array([1, 40, 16, 17, 31, 32, 7, 39], np.int32)
    prompts = RolloutPrompts(rng.integers(0, CONFIG.vocab_size, (8, 40), np.int32), lengths, np.arange(16, dtype=np.uint32))
    options = RolloutOptions(group_size=2, max_new_tokens=21, stop=tuple(range(0, 250, 25)))
    expected = jax.jit(partial(roll_out, CONFIG, options=options))(params, prompts)
    spread = jax.device_put(params, param_shardings(CONFIG, sizes, padded=False))
    found = jax.jit(make_sampler(CONFIG, make_mesh(sizes), options, ComputeOptions()))(spread, prompts)
    for name in ("tokens", "valid", "stopped"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)
    assert 0 < np.sum(found.stopped) < 16, "both kinds of ends are to be seen"


@pytest.mark.slow
def test_prompts_of_a_bucket_over_tensor_have_one_program(load, params, monkeypatch):
    """Whatever laid out its input: the first piece after the prompt, and those after a piece."""
    monkeypatch.setattr(module, "MIN_CACHE_CAPACITY", 8)
    monkeypatch.setattr(prepare_inputs, "MIN_PREFILL_LENGTH", 4)
    before = module._decode_for("cpu")._cache_size()
    for prompt in ([1, 5, 7], [4, 6]):
        pieces = list(llama_jax.stream(*load("tensor=8"), [prompt], max_new_tokens=NEW))
        assert [piece.tokens.shape[1] for piece in pieces] == [1, 4, 4, 4]
        same(to_generations(pieces, ()), llama_jax.generate(CONFIG, params, [prompt], max_new_tokens=NEW))
    assert module._decode_for("cpu")._cache_size() - before == 2  # of the mesh, and of one device


def collectives(config, params, batch):
    """Kind and shape of every collective in the compiled decode loop."""
    sharding = sharding_of(params)
    prompts = [[1, 2, 3]] * batch
    tokens, lengths, request = prepare_inputs.prepare_inputs(
        config, prompts, NEW, Sampling(temperature=1.0, top_p=0.9, top_k=50), [7]
    )
    reading = module._init_prefill(config, params, batch, 256, CacheOptions(), sharding)
    state, _ = module._begin_decode(config, params, *reading, tokens, lengths, request, ComputeOptions(), sharding)
    lowered = module._decode_for("cpu").lower(config, params, state, np.int32(1), 4, ComputeOptions(), sharding)
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|ragged-all-to-all"
    found = re.findall(rf" = ([^=]*?) ({kinds})(?:-start)?\(", lowered.compile().as_text())
    assert found
    # XLA may do several at once: their shapes are then a tuple.
    return Counter((kind, shape) for shapes, kind in found for shape in re.findall(r"\w+\[[\d,]*\]", shapes))


@pytest.mark.slow
def test_decoding_over_tensor_sums_and_gathers_nothing(load):
    """Of a batch of three: no logits, noise, seen tokens, weights or cache travel, only sums and maxima."""
    found = collectives(*load("tensor=8"), 3)
    assert {kind for kind, _ in found} == {"all-reduce"}
    # In the loop over layers a sum of the residual stream after attention and feed-forward, and one after the embedding.
    assert found["all-reduce", "f32[3,32]"] == 2
    assert found["all-reduce", "f32[3,1,32]"] == 1
    assert {shape for _, shape in found} <= {"f32[3,32]", "f32[3,1,32]", "f32[3,1]", "f32[3]", "s32[3]"}


@pytest.mark.slow
def test_decoding_over_data_exchanges_nothing_but_what_the_host_reads(load):
    """The tokens at the end, 16 places each, and whether all rows are done or any is sampled or filtered."""
    found = collectives(*load("data=8"), 8)
    gathered = {("all-gather", f"{dtype}[8,16]") for dtype in ("f32", "s32", "pred")} | {("all-gather", "pred[8]")}
    assert set(found) == gathered | {("all-reduce", "pred[]")}


def test_noise_does_not_depend_on_the_padding():
    """Each place in a row has a number of its own, so that it may be drawn by the device that has the place."""
    draw = jax.random.gumbel
    key = jax.random.key(3)
    np.testing.assert_array_equal(draw(key, (256,))[:250], draw(key, (250,)))


def test_rows_that_cannot_be_divided_are_an_error(load):
    config, params = load("data=2,fsdp=2,tensor=2")
    message = (
        r"batch=3 cannot be split over data\*fsdp=4; pass a multiple of 4 prompts, or use a mesh with tensor parallelism"
    )
    with pytest.raises(MeshError, match=message):
        llama_jax.stream(config, params, PROMPTS[:3], max_new_tokens=NEW)


def test_every_device_holds_its_share_and_no_more(load):
    config, params = load("tensor=8")
    assert config == replace(CONFIG, n_kv_heads=8)
    assert (params.embedding.shape, params.lm_head.shape) == ((256, 32), (256, 32))
    assert params.blocks.attention.qkv.shape == (CONFIG.n_layers, 8, 3, 4, 32)
    norms = (2 * CONFIG.n_layers + 1) * 32
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) // 4
    held = Counter()
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    assert dict(held) == dict.fromkeys(range(8), 4 * (norms + (whole - norms) // 8))


@pytest.mark.parametrize("format", ["safetensors", "gguf", "llama2c", pytest.param("orbax", marks=slow)])
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=slow)])
def test_every_format_is_read_into_its_shares(tmp_path, params, format, tied):
    config = replace(CONFIG, tie_embeddings=tied)
    params = params.replace(lm_head=None) if tied else params
    path = tmp_path / ("model.bin" if format == "llama2c" else "model.gguf" if format == "gguf" else "model")
    llama_jax.save(path, config, params, format=format)
    for sizes in (MeshSizes(fsdp=1, tensor=8), MeshSizes(2, 2, 2)):
        found = llama_jax.load(path, mesh=sizes)
        assert found.config == padded_config(open_checkpoint(path).config, sizes)
        jax.tree.map(np.testing.assert_array_equal, found.params, pad_params(config, sizes, params))
        assert jax.tree.map(lambda a: a.sharding, found.params) == param_shardings(config, sizes)


def test_each_row_is_read_once_for_each_device_that_holds_it(folder):
    """Of tensors that lie on several devices: a key or value head is on two of the eight, everything else on one."""
    opened = open_checkpoint(folder)
    read = Counter()

    class Counted:
        def __init__(self, name, tensor):
            self.name, self.tensor = name, tensor

        def __getattr__(self, name):
            return getattr(self.tensor, name)

        def read(self, start, stop):
            read[self.name] += stop - start
            return self.tensor.read(start, stop)

    counted = replace(opened, tensors={name: Counted(name, tensor) for name, tensor in opened.tensors.items()})
    build_params(pad_to_mesh(counted, MeshSizes(tensor=8)), None, shardings=param_shardings(CONFIG, MeshSizes(tensor=8)))
    for name, tensor in opened.tensors.items():
        assert read[name] == tensor.shape[0] * (2 if "k_proj" in name or "v_proj" in name else 1), name


def test_fitting_what_orbax_read_takes_one_array_more(params, monkeypatch):
    """Bytes on each device while an array is in both forms, above the model's share."""
    sizes = MeshSizes(tensor=8)
    stored = jax.device_put(params, param_shardings(CONFIG, sizes, padded=False))
    others = {id(a) for a in jax.live_arrays()} - {id(a) for a in jax.tree.leaves(stored)}
    peak = []

    def wait(array):
        on_first = (a for a in jax.live_arrays() if id(a) not in others and a.sharding.num_devices == 8)
        peak.append(sum(a.addressable_shards[0].data.nbytes for a in on_first))
        return array

    monkeypatch.setattr(generation_sharding.jax, "block_until_ready", wait)
    found = generation_sharding.pad_on_mesh(CONFIG, sizes, stored)
    share = sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(found))
    largest = max(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(found))
    assert len(peak) == 3  # the embedding, the output projection, and queries, keys and values of all layers
    assert share < max(peak) <= share + largest


@pytest.mark.slow
def test_what_was_padded_and_copied_is_written_as_it_was(load, params, tmp_path):
    for format in ("safetensors", "orbax"):
        llama_jax.save(tmp_path / "again", CONFIG, load("tensor=8")[1], format=format, overwrite=True)
        config, again, _ = llama_jax.load(tmp_path / "again")
        assert config == CONFIG
        jax.tree.map(np.testing.assert_array_equal, again, params)


def test_under_the_fitted_configuration_the_copies_are_the_models_own(load, tmp_path):
    config, params = load("tensor=8")
    llama_jax.save(tmp_path / "again", config, params)
    again = llama_jax.load(tmp_path / "again")
    assert again.config == config
    assert again.params.embedding.shape == (250, 32)


def test_a_mesh_that_cannot_be_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    folder = write_hf_folder(tmp_path / "model", CONFIG)
    monkeypatch.setattr(Dense, "read", lambda *_: pytest.fail("weights were read"))
    for sizes, message in (
        (MeshSizes(tensor=3), r"n_kv_heads=4 \(of 2 queries each\) cannot be split over tensor=3; 1, 2, 4, 8 would do"),
        (
            MeshSizes(fsdp=16),
            r"mesh data=1,fsdp=16,tensor=1 needs 16 devices, but there are 8; JAX_NUM_CPU_DEVICES=16 simulates ",
        ),
    ):
        with pytest.raises(MeshError, match=message):
            llama_jax.load(folder, mesh=sizes)
    with pytest.raises(MeshError, match="mesh data=1,fsdp=1,tensor=2 and shardings both say how the parameters are sharded"):
        llama_jax.load(folder, mesh=MeshSizes(tensor=2), shardings=param_shardings(CONFIG, MeshSizes(tensor=2)))


def test_what_is_wrong_with_a_file_is_said_of_its_own_shapes(tmp_path):
    folder = write_hf_folder(tmp_path / "model", CONFIG, vocab_size=252)
    with pytest.raises(CheckpointError, match=r"has shape \[250, 32\]; the configuration needs \[252, 32\]"):
        llama_jax.load(folder, mesh=MeshSizes(tensor=8))


def test_parameters_on_one_device_ask_for_no_layout(params):
    on_another = jax.device_put(params, jax.devices()[3])
    on_the_host = jax.tree.map(np.asarray, params)
    on_a_mesh_of_one = jax.device_put(params, NamedSharding(make_mesh(MeshSizes()), P()))
    for found in (params, on_another, on_the_host, on_a_mesh_of_one):
        assert sharding_of(found).constrain is unconstrained


def test_any_layout_of_the_parameters_says_where_the_rest_lies(params):
    """Also one with other names: the axes that cut neither heads nor vocabulary cut the rows."""
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), (AxisType.Auto,) * 3)
    found = jax.device_put(params, NamedSharding(mesh, P()))
    assert sharding_of(found).constrain.rows == ("x", "y", "z")
    attention = found.blocks.attention
    heads = jax.device_put(attention.qkv, NamedSharding(mesh, P(None, "y")))
    vocabulary = jax.device_put(found.lm_head, NamedSharding(mesh, P("x")))
    table = jax.device_put(found.embedding, NamedSharding(mesh, P(None, ("x", "z"))))
    blocks = found.blocks.replace(attention=attention.replace(qkv=heads))
    placement = sharding_of(found.replace(blocks=blocks, lm_head=vocabulary, embedding=table)).constrain
    assert (placement.rows, placement.heads, placement.vocabulary, placement.columns) == (("z",), ("y",), ("x",), ("x", "z"))
    with pytest.raises(ValueError, match="no activation of a generation is called 'elsewhere'"):
        placement(found.embedding, "elsewhere")


@pytest.fixture(scope="module")
def on_all(params):
    return pmap_generate(CONFIG, jax.devices()), pmap_replicate(params, jax.devices())


@pytest.mark.slow
def test_pmap_generates_what_one_device_does(on_all, alone):
    run, params = on_all
    same(run(params, PROMPTS, max_new_tokens=NEW, sampling=SAMPLING), alone)


@pytest.mark.slow
def test_pmap_stops_each_row_at_its_own_end(on_all, params, alone):
    run, everywhere = on_all
    stop = [alone[0].tokens[4], alone[2].tokens[7], 3]
    want = llama_jax.generate(CONFIG, params, PROMPTS, max_new_tokens=NEW, sampling=SAMPLING, stop_tokens=stop)
    assert {row.finish_reason for row in want} == {"stop", "length"}
    same(run(everywhere, PROMPTS, max_new_tokens=NEW, sampling=SAMPLING, stop_tokens=stop), want)


@pytest.mark.slow
def test_pmap_reads_long_prompts_in_pieces(on_all, params, monkeypatch):
    for where in (module, single_program):
        monkeypatch.setattr(where, "MAX_PREFILL_CHUNK", 16)
    prompts = [list(range(length)) for length in (40, 3, 33, 16, 17, 1, 39, 5)]
    want = llama_jax.generate(CONFIG, params, prompts, max_new_tokens=4)
    same(on_all[0](on_all[1], prompts, max_new_tokens=4), want)


def test_pmap_refuses_what_it_cannot_do(on_all, params, monkeypatch):
    run, everywhere = on_all
    with pytest.raises(MeshError, match="batch=3 cannot be split over devices=8; 1, 3 would do"):
        run(everywhere, PROMPTS[:3], max_new_tokens=NEW)
    with pytest.raises(MeshError, match=r"parameters on .* is not on all 8 devices; replicate it first"):
        run(params, PROMPTS, max_new_tokens=NEW)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(MeshError, match="pmap needs a single process, but this is one of 2"):
        pmap_generate(CONFIG, jax.devices())


# Its tokens go to a file: the library that connects processes writes to stdout as well, in the midst of lines.
PROCESS = """
import json, sys
import jax
import llama_jax
from llama_jax.parallel.mesh import parse_mesh

port, index, path, text, out = sys.argv[1:]
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(index), initialization_timeout=60)
config, params, _ = llama_jax.load(path, mesh=parse_mesh(text))
sampling = llama_jax.Sampling(temperature=[0.0, 1.0], top_p=0.9, seed=[0, 1])
found = llama_jax.generate(config, params, [[1, 5, 7], [9] * 17], max_new_tokens=12, sampling=sampling)
with open(out, "w") as file:
    json.dump([row.tokens for row in found], file)
jax.distributed.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("text", ["data=2,tensor=4", pytest.param("tensor=8", marks=nightly)])
def test_two_processes_generate_what_one_does(folder, params, text, tmp_path):
    """Each reads its devices' shares, and each gets all tokens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    arguments = [[str(port), str(index), str(folder), text, str(tmp_path / str(index))] for index in range(2)]
    running = [subprocess.Popen([sys.executable, "-c", PROCESS, *a], env=environment) for a in arguments]
    try:
        assert [process.wait(timeout=240) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
    sampling = Sampling(temperature=[0.0, 1.0], top_p=0.9, seed=[0, 1])
    want = llama_jax.generate(CONFIG, params, [[1, 5, 7], [9] * 17], max_new_tokens=NEW, sampling=sampling)
    for index in range(2):
        assert json.loads((tmp_path / str(index)).read_text()) == [row.tokens for row in want]
