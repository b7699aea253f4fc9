import ctypes
import subprocess
import sys

import jax
import pytest

from llama_jax.errors import UserError
from llama_jax.inference import xla_flags as flags
from llama_jax.inference.xla_flags import (
    PLATFORM_FLAGS,
    FlagChanges,
    compiler_options,
    keep_freed_memory,
    set_flags,
    startable,
)

COMPILER_FLAGS = [flag for platform in PLATFORM_FLAGS.values() for flag in platform if flag.name != flag.variable]


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """Libraries that hold the names of all flags, in place of those that are installed."""
    for folder in ("jaxlib", "jax_plugins.xla_cuda12", "libtpu"):
        (tmp_path / folder).mkdir()
    text = "\0".join(flag.name for flag in [*COMPILER_FLAGS, flags._KEEP_CACHE]).encode()
    for folder, file in (entry for entries in flags._LIBRARIES.values() for entry in entries):
        (tmp_path / folder.replace("?", "2") / file).write_bytes(b"\0\1" + text + b"\0")
    monkeypatch.setattr(flags, "_plugin", lambda pattern: tmp_path / pattern.replace("?", "2"))
    monkeypatch.setattr(flags, "_has_started", lambda: False)
    yield tmp_path
    flags._holds.cache_clear()


FAULTS = """
import resource, sys
import numpy as np
from llama_jax.inference.xla_flags import keep_freed_memory, return_large_blocks
done = sys.argv[1] != "not" and keep_freed_memory(("cpu",), {})
if sys.argv[1] == "large":
    return_large_blocks(1 << 30)
np.ones(1 << 24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
np.ones(1 << 24)
print(done, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="not glibc")
def test_freed_memory_is_kept():
    """Counted in pages that the system has to give once more, of 128 MB; they may be large ones."""
    run = lambda how: subprocess.check_output([sys.executable, "-c", FAULTS, how], text=True).split()
    (done, kept), (_, given_back), (_, large) = run("keep"), run("not"), run("large")
    assert done == "True"
    assert int(kept) * 10 < int(given_back)
    assert int(kept) * 10 < int(large)
    assert not keep_freed_memory(("cpu", "gpu"), {})
    assert not keep_freed_memory(("cpu",), {"MALLOC_ARENA_MAX": "2"})
    assert not keep_freed_memory(("cpu",), {"LLAMA_JAX_FLAGS": "off"})


def test_flags_go_where_xla_reads_them(libraries):
    environment = {"XLA_FLAGS": "--xla_dump_to=/tmp/x"}
    settled = set_flags(("gpu", "tpu"), training=True, environment=environment)
    assert settled.written == tuple(flag.name for platform in ("gpu", "tpu") for flag in PLATFORM_FLAGS[platform])
    assert not settled.kept
    assert not settled.unknown
    assert environment["XLA_FLAGS"].startswith("--xla_dump_to=/tmp/x --xla_gpu_enable_pipelined_all_gather=true ")
    assert environment["XLA_CLIENT_MEM_FRACTION"] == "0.95"
    for flag in COMPILER_FLAGS:
        assert f"--{flag.name}={flag.value}" in environment[flag.variable].split()
    again = set_flags(("gpu", "tpu"), training=True, environment=dict(environment))
    assert again.kept == settled.written
    assert not again.written


def test_only_training_sets_what_is_for_training(libraries):
    environment: dict[str, str] = {}
    assert set_flags(("gpu", "tpu"), environment=environment).written == ("XLA_CLIENT_MEM_FRACTION",)
    assert environment == {"XLA_CLIENT_MEM_FRACTION": "0.95"}


def test_what_the_user_has_set_stands(libraries):
    environment = {
        "XLA_FLAGS": "--xla_gpu_enable_pipelined_all_gather=false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5",  # by its older name; XLA refuses both
    }
    settled = set_flags(("gpu",), training=True, environment=environment)
    assert settled.kept == ("xla_gpu_enable_pipelined_all_gather", "XLA_CLIENT_MEM_FRACTION")
    assert environment["XLA_FLAGS"].count("xla_gpu_enable_pipelined_all_gather") == 1
    assert "XLA_CLIENT_MEM_FRACTION" not in environment


def test_they_can_be_turned_off():
    environment = {"LLAMA_JAX_FLAGS": "off"}
    assert set_flags(("gpu", "tpu"), training=True, environment=environment) == FlagChanges()
    assert environment == {"LLAMA_JAX_FLAGS": "off"}
    with pytest.raises(UserError, match="LLAMA_JAX_FLAGS='no' must be on or off"):
        set_flags(("gpu",), training=True, environment={"LLAMA_JAX_FLAGS": "no"})


def test_a_flag_that_this_xla_does_not_have_is_left_out(libraries):
    one = "xla_gpu_enable_pipelined_all_gather"
    library = libraries / "jax_plugins.xla_cuda12" / "xla_cuda_plugin.so"  # jaxlib's own still has it
    library.write_bytes(library.read_bytes().replace(one.encode(), f"{one}_old".encode()))
    environment: dict[str, str] = {}
    settled = set_flags(("gpu",), training=True, environment=environment)
    assert settled.unknown == (one,)
    assert one not in environment["XLA_FLAGS"]
    assert one not in compiler_options("gpu", training=True)
    library.unlink()
    flags._holds.cache_clear()
    assert compiler_options("gpu", training=True) == {}


def test_after_jax_has_started_nothing_would_be_read():
    jax.devices()
    with pytest.raises(UserError, match="JAX has started its devices and no longer reads XLA_"):
        set_flags(("gpu",), training=True, environment={})
    assert set_flags(("cpu",), training=True, environment={}) == FlagChanges()  # there is nothing to set


@pytest.mark.accelerators
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_installed_compilers_have_every_flag(platform):
    if platform not in startable({}):
        pytest.skip(f"no compiler for {platform} is installed")
    assert len(compiler_options(platform, training=True)) == sum(
        flag.name != flag.variable for flag in PLATFORM_FLAGS[platform]
    )
