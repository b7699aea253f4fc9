"""Runs that are profiled while they save, again and again: `python .ci/nightly/profiled_saves.py --help`.

Each run saves after every step, and its profile begins and ends at random ones, so that threads of the saving start and
end while the profiler does. Of each: it takes all its steps, every step is saved whole, there is a profile, and no thread
has died or is left. A run that takes longer than PATIENCE waits for ever: the process then writes where its threads are,
and ends.

Prints one JSON object, and exits with 1 where there was a failure. A run is remade from the seed and its number alone
(`--only`).
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2] / "tests"
PATIENCE = 300  # seconds for a run; the first compiles, and the machine may be busy
STEPS = 8


def profile(folder: Path, seed: int, number: int) -> list[str]:
    """One run; what was wrong about it."""
    from mortal_run import recipe

    import llama_jax
    from llama_jax.errors import CheckpointError
    from llama_jax.formats.step_dirs import check_checksums

    rng = random.Random(f"{seed} {number}")
    start = rng.randint(1, STEPS)
    steps = range(start, rng.randint(start + 1, STEPS + 1))
    wrong: list[str] = []
    threading.excepthook = lambda died: wrong.append(f"the thread {died.thread} died: {died.exc_value!r}")
    sys.unraisablehook = lambda died: wrong.append(f"unraisable: {died.exc_value!r}")
    before = set(threading.enumerate())
    run = replace(recipe(), steps=STEPS, save_every=1, evaluate_every=0, keep_last=2 * STEPS)
    try:
        result = llama_jax.train(run, folder / "run", folder.parent / "words.txt", trace=steps)
    except Exception as error:
        return [*wrong, f"{type(error).__name__}: {error}"]
    finally:
        threading.excepthook, sys.unraisablehook = threading.__excepthook__, sys.__unraisablehook__
    saved = sorted(folder.glob("run/checkpoints/*"))
    if result.step != STEPS or [path.name for path in saved] != [str(step) for step in range(1, STEPS + 1)]:
        wrong.append(f"{result.step} steps, and the checkpoints {[path.name for path in saved]}")
    for path in saved:
        try:
            check_checksums(path)
        except CheckpointError as error:
            wrong.append(str(error))
    if not list((folder / "run" / "trace").rglob("*.xplane.pb")):
        wrong.append(f"there is no profile of the steps {steps}")
    left = [thread.name for thread in threading.enumerate() if thread not in before and not thread.daemon]
    return wrong + ([f"threads that are left: {left}"] if left else [])


def run(numbers: range, seed: int) -> dict[str, Any]:
    """What came of the runs; the failures one by one."""
    started, failures, longest = time.monotonic(), [], 0.0
    with tempfile.TemporaryDirectory() as scratch:
        rng = random.Random(0)
        (Path(scratch) / "words.txt").write_text(" ".join(rng.choices(["the", "llama", "ate", "grass", "and"], k=900)))
        os.environ["LLAMA_JAX_CACHE"] = scratch
        for number in numbers:
            begun = time.monotonic()
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                wrong = profile(Path(folder), seed, number)
            faulthandler.cancel_dump_traceback_later()
            longest = max(longest, time.monotonic() - begun)
            if wrong:
                failures.append({"number": number, "wrong": wrong})
    return {
        "runs": len(numbers),
        "seed": seed,
        "saves": len(numbers) * STEPS,
        "seconds": round(time.monotonic() - started, 1),
        "longest run, s": round(longest, 1),
        "failures": failures,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time() // 86400), help="by default that of the day")
    parser.add_argument("--only", type=int, help="the run of this number")
    given = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    for folder in ("", "runs"):
        sys.path.append(str(HERE / folder))
    sys.path.insert(0, str(HERE.parent))
    with tempfile.TemporaryDirectory() as programs:  # each run compiles the same
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", programs)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        import conftest  # noqa: F401  XLA's settings for tests

        report = run(range(given.cases) if given.only is None else range(given.only, given.only + 1), given.seed)
    print(json.dumps(report, indent=2))
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
