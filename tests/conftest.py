"""Shared data, models and compiled programs."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from functools import partial
from importlib.metadata import version
from pathlib import Path

# Most of the time of the suite is XLA's compiling, and most of that makes programs fast that run once. These settings leave
# that out: the same passes over HLO, so memory, copies and collectives are the same, and simple code for them, of one module
# per program (32 by default, each with its own set-up). The wait of simulated devices for one another is longer than on a
# machine of their own. XLA_FLAGS in the environment replaces all this.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    " --xla_cpu_collective_call_warn_stuck_timeout_seconds=60 --xla_cpu_collective_call_terminate_timeout_seconds=300"
    # Since 0.11 jaxlib has no other emitters, and ends a process that names the flag.
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib") < "0.11" else ""),
)

import jax
import jaxtyping
import make_goldens
import numpy as np
import pytest
from hypothesis import settings
from safetensors.numpy import save_file
from support_claims import SupportClaims

import llama_jax
from llama_jax.cli.argv import parse_command, reorder_argv
from llama_jax.formats.build_params import build_params
from llama_jax.formats.huggingface import HF_NAMES, config_to_dict
from llama_jax.formats.lazy_tensors import ArrayTensor
from llama_jax.formats.weight_format import OpenedCheckpoint
from llama_jax.model.trees import dequantize

# Enough to split a model in every way. JAX must be told before its backend starts, so no test module may start it on import.
jax.config.update("jax_num_cpu_devices", 8)

# Compiling is most of the time of a test, so an example may be slow without the code being slow.
settings.register_profile("llama_jax", deadline=None, max_examples=10, derandomize=True)
settings.register_profile("nightly", deadline=None, max_examples=100)  # pytest --hypothesis-profile nightly
settings.load_profile("llama_jax")


LARGEST_PROGRAMS = 2**30
"""Bytes of compiled programs above which the next run begins with none."""


def pytest_configure(config: pytest.Config) -> None:
    """Programs compiled once are kept: for the processes of this run, and for the next run."""
    config.pluginmanager.register(SupportClaims())
    for ignored in (signal.SIGHUP, signal.SIGINT):  # as under nohup, and after & in a script: children would inherit it
        if signal.getsignal(ignored) is signal.SIG_IGN:
            signal.signal(ignored, signal.default_int_handler if ignored is signal.SIGINT else signal.SIG_DFL)
    if getattr(config, "cache", None) is None or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = config.cache.mkdir("programs")
    if not hasattr(config, "workerinput") and sum(file.stat().st_size for file in folder.iterdir()) > LARGEST_PROGRAMS:
        shutil.rmtree(folder)
        folder.mkdir()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_report_header(config: pytest.Config) -> str | None:
    """What runs and how long, before minutes pass."""
    if config.option.markexpr != config.getini("addopts")[1]:
        return None
    return "the default tests: about 5 minutes on 2 quiet cores; slow ones and those of other packages: see CONTRIBUTING.md"


# Each of these takes most of a minute: at the end of a run one would leave the other processes without work.
FIRST = (
    *("test_aot_compile.py", "test_notebooks.py", "test_nightly.py", "test_experiments.py", "test_gpu_report.py"),
    *("test_clusters.py", "test_benchmarks.py"),
)


TURNS = 5
SLOW_TURNS = 2
"""A run with LLAMA_JAX_TURN=N has one of TURNS parts of the tests marked `rotating`, and one of SLOW_TURNS parts of the
files with other slow tests; the next N has the next part."""


@pytest.hookimpl(trylast=True)  # after those of another mark were left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest first: the first process begins at the front, others take from the end. Of slow ones a part."""
    items.sort(key=lambda item: item.path.name not in FIRST)
    turn = os.environ.get("LLAMA_JAX_TURN", "")
    if turn:
        rotating = [item for item in items if item.get_closest_marker("rotating")]
        left_out = {item for number, item in enumerate(rotating) if (number + int(turn)) % TURNS}
        slow = [item for item in items if item.get_closest_marker("slow") and not item.get_closest_marker("rotating")]
        numbers = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in slow))}
        left_out |= {item for item in slow if (numbers[item.path] + int(turn)) % SLOW_TURNS}
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


def pytest_collection_finish() -> None:
    """What was imported stays for the whole run; collecting garbage need not look through it each time.

    What JAX keeps of traced programs grows all the time, so that looking through it took a second or two, again and again.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 300)


MOST_MAPS = 40_000
"""Of the 65,530 pieces of memory that Linux lets a process map: each program takes some; XLA crashes when none is left."""


@pytest.fixture(scope="module", autouse=True)
def _programs_leave_room():
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()


# By single operations most of a test would be compiling.
jit_logits = jax.jit(llama_jax.logits, static_argnums=0)
jit_dequantize = jax.jit(dequantize)
jit_init = jax.jit(llama_jax.init, static_argnums=(0, 2))


def tiny_config(**changes):
    """Two small layers, whose queries are in groups."""
    sizes = {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48, "max_seq_len": 64}
    others = {"norm_eps": 1e-5, "rope_theta": 1e4, "tie_embeddings": False}
    return llama_jax.LlamaConfig(**sizes | others | changes)


def louder(params, factor):
    """The model with its matrices multiplied."""
    outside = jax.tree.map(lambda a: a * factor if a.ndim > 1 else a, params.replace(blocks=None))
    return outside.replace(blocks=jax.tree.map(lambda a: a * factor if a.ndim > 2 else a, params.blocks))


def first_layers(params, count):
    """The model without its last layers."""
    return params.replace(blocks=jax.tree.map(lambda a: a[:count], params.blocks))


@partial(jax.jit, static_argnums=0)
def sharp(config, key):
    """Random parameters, layer by layer, with logits so sharp that rounding turns no choice over."""
    return louder(llama_jax.init(config, key), 8)


def shared_data(name: str) -> Path:
    """A file or folder of ../shared/data; skips the test in a clone that has none beside it."""
    path = Path(os.environ.get("LLAMA_JAX_TEST_DATA", Path(__file__).parents[2] / "shared" / "data")) / name
    if not path.exists():
        assert "LLAMA_JAX_NO_SKIP" not in os.environ, f"{path} is missing, and here no test may skip"
        pytest.skip("needs real weights and texts, whose folder LLAMA_JAX_TEST_DATA names; see CONTRIBUTING.md")
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct.Q4_1.gguf, which LLAMA_JAX_REAL_MODEL names; skips the test where it does not."""
    path = os.environ.get("LLAMA_JAX_REAL_MODEL")
    if path is None:
        assert "LLAMA_JAX_NO_SKIP" not in os.environ, "LLAMA_JAX_REAL_MODEL is not set, and here no test may skip"
        pytest.skip("needs a real model: set LLAMA_JAX_REAL_MODEL to the path of SmolLM2-135M-Instruct.Q4_1.gguf")
    assert Path(path).is_file(), f"LLAMA_JAX_REAL_MODEL={path} is not a file"
    return Path(path)


@pytest.fixture(scope="session")
def stories_folder() -> Path:
    return shared_data("stories260K")


@pytest.fixture(scope="session")
def stories(stories_folder):
    """The real trained model of 260 thousand parameters."""
    return llama_jax.load(stories_folder)


@pytest.fixture(scope="session")
def goldens() -> dict[str, np.ndarray]:
    with np.load(make_goldens.GOLDENS / "logits.npz") as file:
        return dict(file)


@pytest.fixture
def own_errors():
    """Arrays that a signature does not allow get as far as the library's own errors, as they do outside of tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def calling(monkeypatch, capsys, tmp_path):
    """Calls a command in this process, with a cache of its own: what it prints on stdout and stderr."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("llama_jax.cli.jax_setup.use_compilation_cache", lambda *_: None)

    def call(command, *arguments):
        name, *rest = reorder_argv([command.__name__.lower(), *map(str, arguments)])
        parse_command(command, name, rest).run()
        return capsys.readouterr()

    return call


def params_of(config, tensors: dict[str, np.ndarray], dtype=None):
    """Parameters from tensors by Hugging Face name."""
    held = {name: ArrayTensor(array) for name, array in tensors.items()}
    return build_params(OpenedCheckpoint("test", Path("test"), config, held, HF_NAMES, False, lambda: None), dtype)


@pytest.fixture(scope="session")
def models() -> dict[str, tuple]:
    """{kind: (config, params)} of the small random models of every kind, the same as the goldens'."""
    return {
        kind: (config, params_of(config, make_goldens.random_tensors(config))) for kind, config in make_goldens.KINDS.items()
    }


@pytest.fixture
def hf_folder(tmp_path) -> Path:
    """A small Hugging Face folder to spoil."""
    return write_hf_folder(tmp_path / "model", make_goldens.KINDS["gqa"])


def write_hf_folder(folder: Path, config, tensors: dict[str, np.ndarray] | None = None, **changes) -> Path:
    import json

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_to_dict(config) | changes))
    save_file(tensors or make_goldens.random_tensors(config), folder / "model.safetensors")
    return folder


def as_float64(params):
    """The same parameters in float64; use under `jax.enable_x64`."""
    return jax.tree.map(lambda a: jax.device_put(np.asarray(a, np.float64)), params)


def same(a, b):
    """Assert that two trees of arrays are equal: in structure, numbers and types."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
        assert x.dtype == y.dtype
