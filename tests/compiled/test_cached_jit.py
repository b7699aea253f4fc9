"""Programs found again: what is stored, what is refused, and that a second process traces nothing."""

import errno
import json
import logging
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import make_goldens
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import llama_jax
from llama_jax import compiled, ops
from llama_jax.cli.jax_setup import use_compilation_cache
from llama_jax.compiled import cached_jit as module
from llama_jax.compiled import keys, store
from llama_jax.inference.decode import shard_cache
from llama_jax.model.cache import init_cache, repeat_rows
from llama_jax.model.forward_options import Sharding
from llama_jax.ops.platform import native_code
from llama_jax.serving.engine import Engine
from llama_jax.serving.options import EngineOptions
from llama_jax.serving.programs import programs_for


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that executables are stored in, also those that were compiled in no time."""
    monkeypatch.setenv(compiled.EXECUTABLES_ENV, str(tmp_path / "cache" / "executables"))
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield tmp_path / "cache" / "executables"
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before)


@pytest.fixture
def loads():
    """How long each loading of an executable took, in this test."""
    seconds = []

    def listen(event, duration, **_):
        if event == compiled.LOAD_DURATION_EVENT:
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seconds
    jax.monitoring.unregister_event_duration_listener(listen)


def norm(**options):
    """A small program of the library, as a process has it that has not called it yet."""
    return compiled.jit(ops.rms_norm, static_argnums=(2,), **options)


X, WEIGHT = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), np.ones(4, np.float32)


def expected(x=X):
    return np.asarray(ops.rms_norm(jnp.asarray(x), jnp.asarray(WEIGHT), 1e-5))


GENERATE = """
import json, sys
import jax
import llama_jax
from llama_jax.ops.attention import record_backends
traced = []
jax.monitoring.register_event_duration_secs_listener(lambda event, seconds, **_: traced.append("jaxpr_trace" in event))
config, params, _ = llama_jax.load(sys.argv[1])
traced.clear()
with record_backends() as attention:
    (found,) = llama_jax.generate(config, params, [[1, 100, 200]], max_new_tokens=6)
print(json.dumps([sum(traced), sorted(attention), found.tokens, [x.hex() for x in found.logprobs]]))
"""


@pytest.mark.slow
def test_a_second_process_traces_nothing(stories_folder, stories, folder, monkeypatch):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}

    def run():
        command = [sys.executable, "-c", GENERATE, str(stories_folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
        return json.loads(done.stdout)

    first, second = run(), run()
    assert first[0] > 0
    assert second[0] == 0
    monkeypatch.setenv(compiled.EXECUTABLES_ENV, "off")
    (plain,) = llama_jax.generate(*stories[:2], [[1, 100, 200]], max_new_tokens=6)
    assert first[1:] == second[1:] == [["native"], plain.tokens, [x.hex() for x in plain.logprobs]]


def test_an_executable_is_found_by_the_next_process(folder, loads):
    made, found = norm(), norm()
    first, again, second = made(X, WEIGHT, 1e-5), made(X, WEIGHT, 1e-5), found(X, WEIGHT, 1e-5)
    assert len(loads) == 1
    np.testing.assert_array_equal(first, expected())
    np.testing.assert_array_equal(again, first)
    np.testing.assert_array_equal(second, first)
    (path,) = folder.iterdir()
    assert path.name.startswith("rms_norm-")
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700


def test_nothing_is_stored_without_a_folder(folder, loads, monkeypatch):
    for name in ("off", ""):
        monkeypatch.setenv(compiled.EXECUTABLES_ENV, name)
        np.testing.assert_array_equal(norm()(X, WEIGHT, 1e-5), expected())
    assert not folder.exists()
    assert not loads


def with_body(content, body):
    """A file with another body, and the checksum of that."""
    import hashlib

    magic, _, key, _ = content.split(b"\n", 3)
    return b"\n".join((magic, hashlib.sha256(body).hexdigest().encode(), key, body))


DAMAGE = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[:-100],
    "head alone": lambda content: content[:20],
    "a bit": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    "another format": lambda content: content.replace(store.MAGIC, b"llama_jax executable 0", 1),
    "another key": lambda content: content.replace(content.split(b"\n")[2], b"0" * 64, 1),
    "no pickle": lambda content: with_body(content, b"text"),
    "another object": lambda content: with_body(content, pickle.dumps({"executable": b""})),
    "no executable": lambda content: with_body(
        content, pickle.dumps(module.StoredProgram(b"text", jax.ShapeDtypeStruct((3, 4), np.float32), (), {}))
    ),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_or_foreign_file_is_ignored_and_replaced(damage, folder, loads):
    norm()(X, WEIGHT, 1e-5)
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    np.testing.assert_array_equal(norm()(X, WEIGHT, 1e-5), expected())
    assert not loads
    np.testing.assert_array_equal(norm()(X, WEIGHT, 1e-5), expected())
    assert len(loads) == 1


def test_what_others_may_write_is_not_used(folder, loads, monkeypatch):
    norm()(X, WEIGHT, 1e-5)
    (path,) = folder.iterdir()
    path.chmod(0o666)
    np.testing.assert_array_equal(norm()(X, WEIGHT, 1e-5), expected())
    assert path.stat().st_mode & 0o777 == 0o600  # it was replaced by one's own
    folder.chmod(0o770)
    assert compiled.reason_unsafe(folder) == "others may write to it (mode 770)"
    path.unlink()
    np.testing.assert_array_equal(norm()(X, WEIGHT, 1e-5), expected())
    assert not list(folder.iterdir())
    folder.chmod(0o700)
    norm()(X, WEIGHT, 1e-5)
    owner = folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(store, "ROOT", owner + 2)
    assert compiled.reason_unsafe(folder) == f"it belongs to another user (uid {owner})"
    np.testing.assert_array_equal(norm()(X, WEIGHT, 1e-5), expected())
    assert not loads


def test_a_link_is_not_followed(folder, tmp_path, loads):
    norm()(X, WEIGHT, 1e-5)
    (path,) = folder.iterdir()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    np.testing.assert_array_equal(norm()(X, WEIGHT, 1e-5), expected())
    assert not loads


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_written_fails_nothing(number, folder, monkeypatch, caplog):
    def refuse(path):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("llama_jax.storage.atomic_write.write_atomically", refuse)
    with caplog.at_level(logging.INFO, "llama_jax.compiled"):
        np.testing.assert_array_equal(norm()(X, WEIGHT, 1e-5), expected())
    assert os.strerror(number) in caplog.text
    assert not list(folder.iterdir())


def test_the_folder_is_bounded(folder, loads):
    sizes = (2, 3, 4)
    norm()(X[:2], WEIGHT, 1e-5)
    (first,) = folder.iterdir()
    norm()(X[:1], WEIGHT, 1e-5)
    (second,) = set(folder.iterdir()) - {first}
    for path, used in ((first, 1000), (second, 2000)):
        os.utime(path, (used, used))
    np.testing.assert_array_equal(norm()(X[:2], WEIGHT, 1e-5), expected(X[:2]))  # used last now
    assert len(loads) == 1
    before = jax.config.jax_compilation_cache_max_size
    jax.config.update("jax_compilation_cache_max_size", int(first.stat().st_size * 2.5))
    try:
        norm()(X, WEIGHT, 1e-5)
    finally:
        jax.config.update("jax_compilation_cache_max_size", before)
    assert first.exists()
    assert not second.exists()
    assert len(list(folder.iterdir())) == len(sizes) - 1


def under(context):
    def call():
        with context():
            return norm()(X, WEIGHT, 1e-5)

    return call


def patched(how, *what):
    @contextmanager
    def context():
        with pytest.MonkeyPatch.context() as patch:
            getattr(patch, how)(*what)
            yield

    return under(context)


OTHERS = {
    "shape": lambda: norm()(X[:2], WEIGHT, 1e-5),
    "dtype": lambda: norm()(X.astype(np.float16), WEIGHT, 1e-5),
    "static argument": lambda: norm()(X, WEIGHT, 1e-6),
    "donation": lambda: norm(donate_argnums=0)(X, WEIGHT, 1e-5),
    "compiler option": lambda: norm(compiler_options={"xla_cpu_enable_fast_min_max": True})(X, WEIGHT, 1e-5),
    "device": lambda: norm()(jax.device_put(X, jax.devices()[1]), WEIGHT, 1e-5),
    "x64": under(lambda: jax.enable_x64(True)),
    "precision": under(lambda: jax.default_matmul_precision("highest")),
    "rank promotion": under(lambda: jax.numpy_rank_promotion("warn")),
    "native code": under(lambda: native_code(True)),
    **{name: patched("setenv", name, "off") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "LLAMA_JAX_NATIVE")},
    **{
        name: patched("setattr", f"llama_jax.{name}", lambda: "another")
        for name in ("compiled.keys.library_digest", "ops.cpu.native.processor", "ops.cpu.native.compiler")
    },
    "mesh": under(lambda: jax.sharding.use_abstract_mesh(Mesh(jax.devices()[:2], ("rows",)).abstract_mesh)),
}


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_another_program_has_another_file(call, folder, loads):
    norm()(X, WEIGHT, 1e-5)
    call()
    assert not loads
    call()
    assert len(loads) == 1


def test_a_weak_type_is_another_program(folder, loads):
    weak, strong = jnp.full(4, 1.0), jnp.ones(4)
    x = X.astype(jnp.bfloat16)
    program = norm()
    assert [program(x, scale, 1e-5).dtype for scale in (weak, strong, weak)] == [jnp.bfloat16] * 3
    assert len(list(folder.iterdir())) == 2
    assert not loads


def test_the_digest_is_of_the_sources(tmp_path, monkeypatch):
    (tmp_path / "ops").mkdir()
    for name in ("__init__.py", "ops/kernel.cc", "ops/kernel.h", "ops/data.bin"):
        (tmp_path / name).write_text("first")
    monkeypatch.setattr(keys.llama_jax, "__file__", str(tmp_path / "__init__.py"))
    digest = keys.library_digest.__wrapped__
    before = digest()
    for name, counts in (("ops/data.bin", False), ("ops/kernel.cc", True), ("ops/kernel.h", True), ("__init__.py", True)):
        (tmp_path / name).write_text("other")
        after = digest()
        assert (after != before) == counts
        before = after


def test_programs_in_one_process_are_told_apart(folder):
    """By dtypes and shardings too, of which the quick look at the arguments sees nothing where they are in a tree."""
    program = compiled.jit(repeat_rows, static_argnums=(1, 2))
    devices = jax.devices()
    sharding = NamedSharding(Mesh(devices[:2], ("rows",)), PartitionSpec())
    for _ in range(2):
        for dtype in (jnp.float32, jnp.bfloat16):
            for where in (devices[0], devices[1], sharding):
                cache = jax.device_put(init_cache(make_goldens.KINDS["gqa"], 2, 4, dtype), where)
                found = program(cache, 2, 8)
                assert found.pages.dtype == dtype
                assert found.pages.devices() == cache.pages.devices()
                assert found.length.shape == (4,)


def test_a_program_over_a_mesh_is_found(folder, loads):
    sharding = NamedSharding(Mesh(jax.devices()[2:5], ("rows",)), PartitionSpec("rows"))
    x, weight = jax.device_put(X, sharding), jax.device_put(WEIGHT, NamedSharding(sharding.mesh, PartitionSpec()))
    made, found = norm()(x, weight, 1e-5), norm()(x, weight, 1e-5)
    assert len(loads) == 1
    assert made.sharding == found.sharding
    assert found.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(found, expected())


def test_donated_arguments_are_taken(folder, loads):
    for _ in range(2):
        program = norm(donate_argnums=0)
        x = jax.device_put(X)
        result = program(x, WEIGHT, 1e-5)
        assert x.is_deleted()
        with pytest.raises((RuntimeError, ValueError), match="deleted"):
            program(x, WEIGHT, 1e-5)
        np.testing.assert_array_equal(result, expected())
    assert len(loads) == 1


def test_within_a_traced_function_it_is_the_plain_one(folder):
    program = norm()
    program(X[0], WEIGHT, 1e-5)
    (path,) = folder.iterdir()
    call = lambda x: program(x, WEIGHT, 1e-5)
    np.testing.assert_allclose(jax.vmap(call)(X), expected(), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(call)(X), expected(), rtol=1e-6)
    plain = jax.grad(lambda x: ops.rms_norm(x, WEIGHT, 1e-5).sum())
    np.testing.assert_allclose(jax.grad(lambda x: call(x).sum())(X), plain(X), rtol=1e-5, atol=1e-6)
    assert jax.eval_shape(call, X).shape == X.shape
    assert list(folder.iterdir()) == [path]
    np.testing.assert_array_equal(program(X, WEIGHT, 1e-5), expected())


def test_functions_of_the_users_are_not_stored(folder, caplog):
    """Nobody knows whether their source has changed."""

    def own(x, where):
        return x

    with caplog.at_level(logging.INFO, "llama_jax.compiled"):
        cache = init_cache(make_goldens.KINDS["gqa"], 1, 4, jnp.float32)
        placed = compiled.jit(shard_cache, static_argnums=1)(cache, Sharding(constrain=own))
        assert compiled.jit(lambda x: x + 1)(1) == 2
    assert placed.capacity == cache.capacity
    assert not folder.exists()
    assert "shard_cache is traced in every process: it depends on test_cached_jit.test_functions" in caplog.text


def test_a_platform_that_serializes_nothing_says_so(folder, monkeypatch, caplog):
    def refuse(program):
        raise ValueError("Compilation does not support serialization")

    monkeypatch.setattr(module.serialize_executable, "serialize", refuse)
    with caplog.at_level(logging.INFO, "llama_jax.compiled"):
        np.testing.assert_array_equal(norm()(X, WEIGHT, 1e-5), expected())
    assert "rms_norm is traced in every process: it cannot be serialized (Compilation does not support" in caplog.text
    assert not folder.exists()


def test_programs_made_ahead_from_shapes_are_those_that_are_called(folder, loads):
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    program = norm()
    results, make = program.lower_ahead(shape, jnp.asarray(WEIGHT), 1e-5)
    assert (results.shape, results.dtype) == (X.shape, X.dtype)
    assert not folder.exists()
    with ThreadPoolExecutor(1) as threads:
        threads.submit(make).result()
    (path,) = folder.iterdir()
    np.testing.assert_array_equal(program(jnp.asarray(X), jnp.asarray(WEIGHT), 1e-5), expected())
    assert list(folder.iterdir()) == [path]
    assert not loads
    program = norm()
    results, load = program.lower_ahead(shape, jnp.asarray(WEIGHT), 1e-5)
    assert (results.shape, results.dtype) == (X.shape, X.dtype)
    load()
    assert len(loads) == 1
    np.testing.assert_array_equal(program(X, WEIGHT, 1e-5), expected())
    assert len(loads) == 1


def test_threads_may_call_one_program(folder):
    programs = [norm(), norm()]
    with ThreadPoolExecutor(4) as threads:
        found = [threads.submit(program, X, WEIGHT, 1e-5) for program in programs * 4]
        for result in found:
            np.testing.assert_array_equal(result.result(), expected())
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("off", [False, True])
def test_commands_store_executables_beside_jaxs_programs(off, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(compiled.EXECUTABLES_ENV)
    settings = {}
    monkeypatch.setattr(jax.config, "update", settings.__setitem__)
    use_compilation_cache(off)
    wanted = "off" if off else str(tmp_path / "cache" / "executables")
    assert os.environ[compiled.EXECUTABLES_ENV] == wanted
    assert settings.get("jax_enable_compilation_cache", True) is not off
    assert capsys.readouterr().err == ""


def test_commands_say_that_a_folder_is_not_their_users_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    (tmp_path / "executables").mkdir()
    (tmp_path / "executables").chmod(0o777)
    monkeypatch.delenv(compiled.EXECUTABLES_ENV)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    use_compilation_cache()
    said = f"llama-jax: executables in {tmp_path}/executables are not used: others may write to it (mode 777)\n"
    assert capsys.readouterr().err == said


@pytest.mark.slow
def test_a_second_server_traces_nothing(folder, loads):
    config = llama_jax.preset("stories-260k")
    params = llama_jax.init(config, jax.random.key(0))
    traced = []

    def listen(event, seconds, **_):
        traced.append(event == "/jax/core/compile/jaxpr_trace_duration")

    def serve():
        programs_for.cache_clear()  # as in a process of its own
        jax.clear_caches()
        engine = Engine(config, params, EngineOptions(rows=1, context=16, prefill_chunk=16))
        traced.clear()
        engine.warm()
        count = sum(traced)
        engine.close()
        return count

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        first, files = serve(), sorted(folder.iterdir())
        assert first > 0
        assert not loads
        assert serve() == 0
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
        programs_for.cache_clear()
    assert sorted(folder.iterdir()) == files
    assert len(loads) == len(files)
