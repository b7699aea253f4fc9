"""The files that one token, and one training step, really pass through are those that docs/how_it_works.md names."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import jit_init

import llama_jax

PACKAGE = Path(llama_jax.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "how_it_works.md"
LEFT_OUT = {  # as the page says
    *(
        "errors.py",
        "ops/__init__.py",
        "ops/cpu/__init__.py",
        "ops/cpu/native/__init__.py",
        "ops/cpu/threefry.py",
        "ops/exact.py",
        "ops/gradients.py",
        "ops/platform.py",
        "settings.py",
    ),
    *("config/parts.py", "model/checks.py", "model/hooks.py"),
}
# Of sizes that no other test has: what JAX has traced before it does not trace again.
CONFIG = replace(llama_jax.preset("stories-260k"), n_layers=2, vocab_size=509)


LISTENERS = jax.monitoring.record_event_duration_secs.__code__.co_filename


def visited(run: Callable[[], object]) -> set[str]:
    """The files of this package of which a function is called, but for what other tests have JAX tell of its events."""
    called = set()

    def note(frame, event, _):
        # Class bodies, which run when a file is imported, are not optimized code.
        if (
            event == "call"
            and frame.f_code.co_flags & inspect.CO_OPTIMIZED
            and (frame.f_back is None or frame.f_back.f_code.co_filename != LISTENERS)
        ):
            called.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    paths = {Path(code.co_filename) for code in called if code.co_name != "<module>"}
    return {path.relative_to(PACKAGE).as_posix() for path in paths if path.is_relative_to(PACKAGE)} - LEFT_OUT


def named(title: str) -> set[str]:
    """The files in the first column of a table of the page."""
    section = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    files = [name for row in rows for name in re.findall(r"`([\w/]+\.py)`", row)]
    assert len(files) == len(set(files))
    return set(files)


def lines(files: set[str]) -> int:
    return sum(len((PACKAGE / name).read_text().splitlines()) for name in files)


@pytest.fixture(scope="module")
def params():
    return jit_init(CONFIG, jax.random.key(0))


def test_one_token_through_generate(params, monkeypatch):
    monkeypatch.setenv("LLAMA_JAX_NATIVE", "off")  # the page is about the functions that native code replaces
    run = partial(llama_jax.generate, CONFIG, params, [[1, 2, 3]], max_new_tokens=6)
    files = visited(run)
    assert files == named("One token through `generate`")
    assert len(files) <= 22
    assert lines(files) < 4300  # "some 4,300"


def test_one_batch_through_train_step(params):
    optimizer = llama_jax.make_optimizer(llama_jax.OptimizerSettings(), 10)
    state = llama_jax.init_state(optimizer, params)
    batch = llama_jax.Batch(np.ones((2, 33), np.int32))
    step = jax.jit(partial(llama_jax.train_step, CONFIG, optimizer))
    files = visited(partial(step, state, batch))
    assert files == named("One batch through `train_step`")
    assert len(files) <= 20
    assert lines(files) < 3750  # "some 3,700"


@pytest.mark.parametrize(
    ("module", "most_files", "most_lines"),
    [("inference.generate", 46, 7000), pytest.param("training.step", 43, 6300, marks=pytest.mark.slow)],
)
def test_what_an_entry_point_imports(module, most_files, most_lines):
    """Kernels, quantized formats, experts, drafts and the CPU's variants are imported by what uses them."""
    code = (
        f"import sys, llama_jax.{module}; print(*(m.__file__ for n, m in sys.modules.items() if n.startswith('llama_jax')))"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    files = {Path(name).relative_to(PACKAGE).as_posix() for name in run.stdout.split()}
    assert len(files) <= most_files
    assert lines(files) <= most_lines
