"""A trace is what the forward pass does, and transformers; what a model shows of itself; and no oracle's file does harm."""

import contextlib
import io
import json
import os
import pickle
import zipfile
from dataclasses import replace

import jax
import make_goldens
import ml_dtypes
import numpy as np
import pytest
from conftest import first_layers, jit_logits, params_of, write_hf_folder
from hypothesis import given
from hypothesis import strategies as st

import llama_jax
from llama_jax import ops
from llama_jax.errors import CheckpointError
from llama_jax.formats.huggingface import HF_NAMES, config_to_dict, from_params
from llama_jax.verify import activations
from llama_jax.verify.activations import (
    SAMPLE_TEXT,
    Trace,
    check_logits,
    check_speech,
    read_oracle,
    run_layer,
    run_output,
    run_transformers,
    trace,
    write_oracle,
)
from llama_jax.verify.compare import compare
from llama_jax.verify.rounding_error import Origin

KINDS = make_goldens.KINDS
TOKENS = np.random.default_rng(0).integers(0, 96, 24, dtype=np.int32)


@pytest.fixture(scope="module")
def traced(models):
    config, params = models["gqa"]
    return trace(params, TOKENS, Origin("test", config, ("F32",), "float32", {}))


def test_streams_and_logits_are_those_of_the_forward_pass(models, traced):
    config, params = models["gqa"]
    np.testing.assert_array_equal(traced.streams[0], np.asarray(params.embedding)[TOKENS])
    for i in (1, 2):
        forward = jax.jit(llama_jax.forward, static_argnums=0)
        hidden, _ = forward(replace(config, n_layers=i), first_layers(params, i), TOKENS[None])
        normed = jax.jit(ops.rms_norm)(traced.streams[i], params.final_norm, config.norm_eps)
        np.testing.assert_allclose(normed, hidden[0], atol=1e-5)
    np.testing.assert_allclose(traced.logits, jit_logits(config, params, TOKENS[None])[0], atol=1e-5)
    assert (traced.logits.dtype, traced.streams.dtype) == (np.float32, np.float32)


def test_the_parts_one_by_one_make_up_the_whole(models, traced):
    config, params = models["gqa"]
    for i, block in enumerate(llama_jax.layers_of(params)):
        np.testing.assert_allclose(run_layer(config, block, traced.streams[i]), traced.streams[i + 1], atol=1e-5)
    np.testing.assert_allclose(run_output(config, params, traced.streams[-1]), traced.logits, atol=1e-5)


@pytest.fixture(scope="module")
def read(stories):
    """Trace the stories model, its tensors changed by a function, over the built-in text."""
    config, params, tokenizer = stories
    tokens = np.array(tokenizer.encode(SAMPLE_TEXT)[:64], np.int32)

    def read(change=lambda tensors: {}):
        whole = from_params(config, params, None).tensors
        tensors = {name: tensor.read(0, tensor.shape[0]) for name, tensor in whole.items()}
        spoiled = params_of(config, tensors | change(tensors))
        return trace(spoiled, tokens, Origin("stories", config, ("F32",), "float32", {}))

    return read


def other_layout(turn):
    def change(tensors):
        parts = [(HF_NAMES[part].format(i), heads) for i in range(5) for part, heads in (("q", 8), ("k", 4))]
        return {name: turn(tensors[name].reshape(heads, 8, 64)).reshape(-1, 64) for name, heads in parts}

    return change


def test_the_stories_model_speaks(read):
    found = check_speech(read())
    assert found.passed
    assert "1.37 nats per token, against 6.24 for a uniform guess" in found.detail


@pytest.mark.parametrize(
    "change",
    [
        other_layout(ops.rotary.half_from_interleaved),
        other_layout(ops.rotary.interleaved_from_half),
        lambda t: {name: t[name].T.copy() for name in (HF_NAMES["out"].format(i) for i in range(5))},
        lambda t: {HF_NAMES["gate"].format(i): t[HF_NAMES["up"].format(i)] for i in range(5)},
        lambda t: {HF_NAMES["embedding"]: t[HF_NAMES["embedding"]][::-1].copy()},
    ],
    ids=["Meta's layout", "turned twice", "out transposed", "up for gate", "vocabulary reversed"],
)
def test_a_model_that_is_put_together_wrongly_does_not(read, change):
    assert not check_speech(read(change)).passed


def test_logits(stories):
    origin = Origin("x", stories[0], ("F32",), "float32", {})
    logits = np.zeros((4, 512), np.float32)
    logits[1, 3] = -7
    good = Trace(origin, np.zeros(4, np.int32), logits, np.zeros((6, 4, 64), np.float32))
    assert check_logits(good)[1:] == (True, "finite, the largest 7")
    logits[2, 5] = np.nan
    assert check_logits(good)[1:] == (False, "NOT finite from position 2 on")


# -- oracles -------------------------------------------------------------------------------------------------------------

CONFIG = replace(KINDS["llama3"], vocab_size=12, dim=8, n_heads=2, n_kv_heads=1, hidden_dim=6, head_dim=4)


@pytest.fixture(scope="module")
def oracle() -> Trace:
    """An invented model: only its shapes matter here."""
    rng = np.random.default_rng(0)
    return Trace(
        Origin("some model", CONFIG, ("F32", "Q4_0"), "float32", {"llama_jax": "0.1.0"}),
        rng.integers(0, 12, 5, dtype=np.int32),
        rng.standard_normal((5, 12), np.float32),
        rng.standard_normal((3, 5, 8), np.float32),
    )


@pytest.fixture(scope="module")
def path(oracle, tmp_path_factory):
    path = tmp_path_factory.mktemp("oracle") / "model.oracle"
    write_oracle(path, oracle)
    return path


def same(a: Trace, b: Trace) -> bool:
    return a.origin == b.origin and all(
        np.array_equal(getattr(a, n), getattr(b, n)) for n in ("tokens", "logits", "streams")
    )


def write_members(path, members: dict[str, bytes], compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def members_of(path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def npy(array, **options) -> bytes:
    content = io.BytesIO()
    np.lib.format.write_array(content, array, **options)
    return content.getvalue()


def test_an_oracle_comes_back_under_the_name_it_was_given(path, oracle):
    assert os.listdir(path.parent) == [path.name]
    assert same(read_oracle(path), oracle)


class Harm:
    def __reduce__(self):
        return os.mkdir, (os.environ["HARM"],)


def test_no_pickle_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    hostile = tmp_path / "hostile"
    write_members(hostile, members_of(path) | {"logits.npy": npy(np.array([Harm()]), allow_pickle=True)})
    with pytest.raises(CheckpointError, match=r"logits.npy holds object"):
        read_oracle(hostile)
    hostile.write_bytes(pickle.dumps(Harm()))
    with pytest.raises(CheckpointError, match="is not a whole oracle"):
        read_oracle(hostile)
    assert not (tmp_path / "harm").exists()


def header(shape: str, descr: str = "<f4") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


ABOUT = {
    "format": activations.ORACLE_FORMAT,
    "name": "n",
    "config": config_to_dict(CONFIG),
    "kinds": ["F32"],
    "dtype": "float32",
    "versions": {},
}


def about(**changes) -> bytes:
    return npy(np.frombuffer(json.dumps(ABOUT | changes).encode(), np.uint8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits.npy": b""}, "EOF"),
        ({"logits.npy": header("(1000000000000, 1000000)")}, "reshape"),
        ({"logits.npy": header("(" * 5000)}, "."),
        ({"logits.npy": npy(np.zeros((5, 12)))}, "holds float64 .* not rows of <f4"),
        ({"logits.npy": npy(np.full((5, 12), np.nan, np.float32))}, "not finite"),
        ({"streams.npy": npy(np.zeros((2, 5, 8), np.float32))}, "do not match its configuration"),
        ({"tokens.npy": npy(np.full(5, 12, np.int32))}, "do not match its configuration"),
        ({"tokens.npy": npy(np.zeros(5, np.int32), version=(2, 0))}, "Cannot parse header"),
        ({"about.npy": npy(np.frombuffer(b"[" * 10_000, np.uint8))}, "recursion|Expecting|decode"),
        ({"about.npy": about(format="llama_jax oracle 9")}, "it is of another version"),
        ({"about.npy": about(kinds=["F32", "Q0"])}, "unknown types of tensors"),
        ({"about.npy": about(dtype="int8")}, "dtype 'int8'"),
        ({"about.npy": about(config={"model_type": "gemma2"})}, "gemma2"),
        ({"streams.npy": None}, "streams.npy"),
    ],
)
def test_a_damaged_or_hostile_member_is_one_line(path, tmp_path, changes, message):
    spoiled = tmp_path / "spoiled"
    members = members_of(path) | changes
    write_members(spoiled, {name: content for name, content in members.items() if content is not None})
    with pytest.raises(CheckpointError, match=r"spoiled is not a whole oracle \(.*" + message) as caught:
        read_oracle(spoiled)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_what_is_compressed_is_not_unpacked(path, tmp_path):
    write_members(tmp_path / "bomb", members_of(path), zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"tokens.npy is compressed"):
        read_oracle(tmp_path / "bomb")


def test_what_is_no_file_or_too_large(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("nowhere", "pipe", "."):
        with pytest.raises(CheckpointError, match="is not a file"):
            read_oracle(tmp_path / name)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(activations.MAX_ORACLE_BYTES + 1)
    with pytest.raises(CheckpointError, match="too many for an oracle"):
        read_oracle(tmp_path / "large")


@given(data=st.data())
def test_any_damage_is_found_or_without_effect(path, oracle, tmp_path_factory, data):
    whole = path.read_bytes()
    spoiled = tmp_path_factory.getbasetemp() / "spoiled"
    at = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        spoiled.write_bytes(whole[:at])
    else:
        spoiled.write_bytes(whole[:at] + data.draw(st.binary(min_size=1, max_size=4)) + whole[at + 4 :])
    with contextlib.suppress(CheckpointError):  # anything else that is raised is a fault
        assert same(read_oracle(spoiled), oracle)


# -- transformers --------------------------------------------------------------------------------------------------------


MANY = np.random.default_rng(3).integers(0, 96, 48, dtype=np.int32)


@pytest.mark.parity
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_agrees(kind, tmp_path, models):
    config, params = models[kind]
    found = run_transformers(write_hf_folder(tmp_path / "model", config), MANY)
    assert found.origin.config == config
    compared = compare(params, trace(params, MANY, Origin("here", config, ("F32",), "float32", {})), found)
    assert compared.same, compared.why
    assert compared.rounding == "float32"
    assert compared.max_abs < 1e-4
    assert compared.agreeing + compared.ties == 48
    # A limit is worth something where what is right stays far below it.
    assert max(part.roundings for part in compared.parts) < 3


@pytest.mark.parity
def test_transformers_in_bfloat16_files_and_a_wrong_layer(tmp_path):
    config = KINDS["gqa"]
    tensors = make_goldens.random_tensors(config)
    narrow = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}
    found = run_transformers(write_hf_folder(tmp_path / "model", config, narrow), MANY)
    assert found.origin.tensor_types == ("BF16",)

    def against(tensors, kinds):
        params = params_of(config, tensors, "float32")
        return compare(params, trace(params, MANY, Origin("here", config, kinds, "float32", {})), found)

    assert against(narrow, ("BF16",)).rounding == "float32"
    assert against(tensors, ("F32",)).why.startswith("the same model within the rounding of BF16")
    name = HF_NAMES["v"].format(1)
    wrong = against(tensors | {name: tensors[name][::-1].copy()}, ("F32",))
    assert "layer 1 differs" in wrong.why
