"""How native kernels are compiled: once each, and without holding up an exit; and what an error in one becomes."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llama_jax.ops.cpu import native

needs_compiler = pytest.mark.skipif(not native.usable("paged_float32"), reason="no C++ compiler here")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs named pipes and fork")
SECONDS = 100  # limit for a program; its compiler takes longer

# Says that it has begun, through a named pipe that is closed once one has said so: another's SIGPIPE is ignored.
SLOW = """#!/bin/sh
[ "$1" = --version ] && echo 1 && exit
trap '' PIPE
echo > "$BEGUN"
sleep 600
"""
BEGIN = """
import os, sys
from llama_jax.ops.cpu import native
native.prepare(native.LIBRARIES)
open(os.environ["BEGUN"]).read(1)
"""
EXIT = "raise SystemExit('something else is wrong')"
FORK = """
child = os.fork()
if child == 0:
    os.environ["CXX"] = os.environ["PATH"] = ""
    os._exit(0 if not native.usable("rows") else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def compiler(folder, script):
    made = folder / "compiler"
    made.write_text(script)
    made.chmod(0o755)
    return made


def while_compiling(folder, program):
    """The program run, once a compiler that takes long has begun; with its cache folder."""
    os.mkfifo(folder / "begun")
    places = {"XDG_CACHE_HOME": str(folder / "cache"), "HOME": str(folder), "BEGUN": str(folder / "begun")}
    environment = os.environ | places | {"CXX": str(compiler(folder, SLOW)), "LLAMA_JAX_NATIVE": "on"}
    return subprocess.run(
        [sys.executable, "-c", BEGIN + program], env=environment, capture_output=True, text=True, timeout=SECONDS
    )


@needs_fork
def test_exit_does_not_wait_for_compilers(tmp_path):
    done = while_compiling(tmp_path, EXIT)
    assert done.returncode == 1
    assert "something else is wrong" in done.stderr
    assert "slower" not in done.stderr, "that they were stopped is no news"
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()], "what they have begun is removed"


@needs_fork
def test_a_forked_process_compiles_what_was_not_finished(tmp_path):
    done = while_compiling(tmp_path, FORK)
    assert done.returncode == 0, done.stderr


def test_threads_that_ask_at_once_compile_once(monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_futures", {})
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path))
    script = f'#!/bin/sh\n[ "$1" = --version ] && echo 1 && exit\necho >> "{tmp_path}/asked"\nexit 1\n'
    monkeypatch.setenv("CXX", str(compiler(tmp_path, script)))
    barrier, interval = threading.Barrier(16), sys.getswitchinterval()

    def ask(_):
        barrier.wait()
        return native.usable("rows")

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(16) as pool:
            assert not any(pool.map(ask, range(16)))
    finally:
        sys.setswitchinterval(interval)
    assert len((tmp_path / "asked").read_text().splitlines()) == 1


@needs_compiler
@pytest.mark.parametrize("window", [{}, {"window": np.int32(5)}, {"window": np.float64(0.5)}, {"window": "0"}])
def test_an_attribute_that_is_missing_or_of_another_type_is_an_error(window):
    pages, row = jnp.zeros((1, 1, 8, 2, 16)), jnp.zeros(1, jnp.int32)
    call = jax.ffi.ffi_call(f"{native.KERNEL_PREFIX}paged_float32", jax.ShapeDtypeStruct((1, 1, 1, 16), jnp.float32))
    where = jnp.zeros((), jnp.int32), row[None], row + 1, jnp.asarray([0, 1], jnp.int32)
    operands = jnp.zeros((1, 1, 1, 16)), pages, jnp.zeros(0), *where
    options = {"scale": np.float32(1), "chunk": np.int64(0)}
    with pytest.raises(jax.errors.JaxRuntimeError, match="the attribute window is missing or of another type"):
        call(*operands, **options, **window).block_until_ready()
    # Of another value than those above: to JAX, which keeps what it has compiled, numbers are equal in any type.
    assert call(*operands, **options, window=np.int64(0)).shape == (1, 1, 1, 16)


THROWING = """
#include <stdexcept>
#include "thread_pool.h"
static void run(const Call& call) {
  share(ThreadPool(call), 64, [&](int64_t part) {
    call.out<float>()[part] = 1;
    if (part % 8 == call.argument(0).dims[0]) throw THROWN;
  });
}
"""


@needs_compiler
@pytest.mark.parametrize(
    ("thrown", "said"), [("std::bad_alloc()", "RESOURCE_EXHAUSTED"), ('std::runtime_error("no luck")', "INTERNAL: no luck")]
)
def test_what_a_part_of_a_kernel_throws_is_an_error(thrown, said, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "_futures", {})
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path))
    source = tmp_path / "throwing.cc"
    source.write_text(THROWING)
    name = f"throwing_{said[:3].lower()}"
    monkeypatch.setitem(native.LIBRARIES, name, (str(source), f"-DTHROWN={thrown}", f"-I{native.SOURCE_FOLDER}"))
    assert native.usable(name)
    call = jax.ffi.ffi_call(f"{native.KERNEL_PREFIX}{name}", jax.ShapeDtypeStruct((64,), jnp.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match=said):
        call(jnp.zeros(3)).block_until_ready()
    np.testing.assert_array_equal(call(jnp.zeros(9)), np.ones(64))
