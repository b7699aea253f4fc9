"""Damaged files by the hundred thousand, over all formats, vocabularies and templates: see `--help`.

Each case is a sound model, vocabulary or template with one to three changes, loaded in a worker process. What may come of it
is a result or a `UserError`. Counted as failures are: a process that dies, a case over SECONDS, another exception, something
that runs a program or opens a connection, and memory above BYTES and four times the file (or its parameters in float32).

Prints one JSON object, and exits with 1 where there was a failure. A case is remade from the seed and its number alone
(`--only`); the spoiled files of failures are kept under `--keep`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2] / "tests"
SECONDS = 10  # of a case, of the processor
PATIENCE = 120  # seconds on the clock for an answer: the first case of a worker compiles, and the machine may be busy
BYTES = 100 << 20
DATA = 8 << 30  # bytes that a worker may have at all
CHECKPOINTS = ("safetensors", "sharded", "meta", "training", "gguf", "q8_0", "llama2c-0", "llama2c-1", "llama2c-2")
QUANTISED = ("int4 by 32, asymmetric", "gptq", "awq", "nf4 twice", "fp8")
VOCABULARIES = ("sentencepiece", "ranks", "bytes", "spaces")
# Cases of a hundred; orbax takes a tenth of a second for each, a template the start of a process.
SHARES = dict.fromkeys(CHECKPOINTS, 6) | dict.fromkeys(QUANTISED, 2) | {"orbax": 1}
SHARES |= dict.fromkeys(VOCABULARIES, 6) | {"inside a gguf": 8, "template": 3}
assert sum(SHARES.values()) == 100
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "pickle.find_class")
# What a random value in a JSON file becomes.
ODD = (
    *(None, True, [], {}, "", "\0", -1, 0, 1, 1.5, 1e308, float("nan"), 2**31, 2**63, 10**400, "x" * 100_000, [[[[]]]] * 99),
    *({"content": {}}, {"a": {"a": {}}}, list(range(1000)), [0] * 10_000, "{{ x }}"),
)
# What is put into a template, or takes the place of a part of it.
JINJA = (
    *(
        "{%",
        "%}",
        "{{",
        "}}",
        "{#",
        "|",
        "~",
        "*",
        "**",
        "%",
        "//",
        "(",
        ")",
        "[",
        "]",
        ".",
        "for",
        "if",
        "endfor",
        "set x =",
    ),
    *(
        "messages",
        "loop",
        "namespace()",
        "| tojson",
        "| join",
        "| list",
        "| replace('a', messages | string)",
        "range(99999)",
    ),
    *("10 ** 9", "'%99999d' % 1", ".__class__", "| attr('__init__')", "{% endif %}", "is divisibleby 7", "[::-1]", "cycler"),
    *("{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% macro f() %}", "{{ f() }}", ".format(9)", "joiner()"),
)


class Case:
    """One damaged thing: what it is of, and how it is read."""

    def __init__(self, seeds: dict[str, Any], seed: int, number: int, folder: Path) -> None:
        from test_corruption import corrupt

        rng = random.Random(f"{seed} {number}")
        self.kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
        self.folder = folder
        if self.kind == "template":
            self.template = _spoil_template(rng.choice(seeds["template"]), rng)
            (folder / "template.jinja").write_text(self.template, errors="surrogatepass")
            self.size = len(self.template)
            return
        base, files, self.path = seeds[self.kind]
        shutil.copytree(base, folder, dirs_exist_ok=True)
        file = folder / rng.choice(files)
        content = file.read_bytes()
        if file.suffix == ".json" and rng.random() < 0.6:
            file.write_text(json.dumps(_spoil_json(json.loads(content), rng)))
        else:
            file.write_bytes(corrupt(content, rng))
        self.size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        self.quantize = rng.choice([None, "keep"]) if self.kind in QUANTISED else None

    def read(self) -> None:
        import llama_jax
        from llama_jax.tokenizers import load_tokenizer
        from llama_jax.tokenizers.chat_template import shared_renderer

        if self.kind == "template":
            chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
            shared_renderer(os.getpid()).render(
                self.template, chat, reply=True, variables={"bos_token": "<s>", "eos_token": "</s>"}
            )
            return
        if self.kind in VOCABULARIES:
            tokenizer = load_tokenizer(self.folder)
        else:
            config, params, tokenizer = llama_jax.load(self.folder / self.path, quantize=self.quantize)
            self.size = max(self.size, 4 * llama_jax.parameter_count(config))
            del params
        if tokenizer is not None:
            ids = tokenizer.encode("once upon a time</s> é\n", bos=False, special=True)
            tokenizer.decode(ids)


def _spoil_json(found: Any, rng: random.Random) -> Any:
    """The same with another value somewhere, or without one."""
    places = list(_places(found))
    for holder, key in rng.sample(places, min(len(places), rng.choice([1, 1, 2]))):
        if rng.random() < 0.2 and isinstance(holder, dict):
            holder.pop(key, None)
        elif isinstance(holder, dict) or key < len(holder):
            holder[key] = rng.choice(ODD)
    return found


def _places(found: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in list(found.items() if isinstance(found, dict) else enumerate(found)):
        yield found, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _spoil_template(text: str, rng: random.Random) -> str:
    for _ in range(rng.choice([1, 1, 2, 4])):
        at = rng.randrange(len(text) + 1)
        end = at + rng.choice([0, 0, 1, 5, 40])
        text = text[:at] + rng.choice([*JINJA, "", chr(rng.randrange(0xD800))]) + text[end:]
    return text


def make_seeds(folder: Path) -> dict[str, Any]:
    """The sound ones, by kind: folder, the files that are spoiled, and what is loaded; of templates, their texts."""
    import make_goldens
    import vocabularies
    from conftest import params_of
    from make_format_goldens import SMALL
    from test_chat_formats import TEMPLATES
    from test_chat_template import EVERYTHING
    from test_corruption import make

    import llama_jax
    from llama_jax.tokenizers import load_tokenizer

    seeds: dict[str, Any] = {"template": [*TEMPLATES.values(), EVERYTHING.replace("{% break %}", "")]}
    for kind in (*CHECKPOINTS, *QUANTISED, "orbax"):
        (folder / kind).mkdir()
        path, files = make(kind, folder / kind)
        base = path if path.is_dir() else path.parent
        seeds[kind] = base, files, Path() if path.is_dir() else Path(path.name)
    for kind in VOCABULARIES:
        beside = {"chat_template": TEMPLATES["llama2"], "added_tokens_decoder": {"300": {"content": "<x>", "special": True}}}
        path = vocabularies.write(folder / kind, kind, tokenizer_config=beside, generation_config={"eos_token_id": [2]})
        seeds[kind] = path, [file.name for file in path.iterdir()], Path()
    (folder / "inside").mkdir()
    tokenizer = load_tokenizer(folder / "bytes")
    config = replace(SMALL, vocab_size=tokenizer.vocab_size)
    params = params_of(config, make_goldens.random_tensors(config))
    llama_jax.save(folder / "inside" / "m.gguf", config, params, tokenizer, format="gguf")
    seeds["inside a gguf"] = folder / "inside", ["m.gguf"], Path("m.gguf")
    return seeds


# The worker.

_events: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    # A template is rendered by a process that this library starts; that and no other.
    if event in FORBIDDEN and not (
        event == "subprocess.Popen" and any("template_worker.py" in str(each) for each in arguments[1])
    ):
        _events.append(event)


def _resident(name: str) -> int:
    """Bytes of memory: "VmRSS" now, "VmHWM" at most since the last `_forget_peak`; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def _forget_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def work(seed: int) -> None:
    """Answer each number on standard input with a line of JSON on what came of its case."""
    for folder in ("", "formats", "tokenizers"):
        sys.path.append(str(HERE / folder))
    import resource
    import warnings

    import jax

    from llama_jax.errors import UserError

    warnings.simplefilter("ignore")
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), open(os.devnull, "w")  # noqa: SIM115
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "seeds").mkdir()
        seeds = make_seeds(Path(scratch) / "seeds")
        if sys.platform == "linux":
            resource.setrlimit(resource.RLIMIT_DATA, (DATA, DATA))
        sys.addaudithook(_audit)
        print("ready", file=answers, flush=True)
        for done, line in enumerate(sys.stdin):
            number, kept = json.loads(line)
            folder = Path(scratch) / "case"
            folder.mkdir()
            case = Case(seeds, seed, number, folder)
            _events.clear()
            _forget_peak()
            before, started = _resident("VmRSS"), time.process_time()
            try:
                case.read()
                found = "valid"
            except UserError as error:
                found = "refused" if "\n" not in str(error) and len(str(error)) < 2000 else f"unreadable: {error!s:.200}"
            except BaseException as error:
                found = f"foreign: {type(error).__name__}: {error!s:.200}"
            seconds, grown = time.process_time() - started, max(0, _resident("VmHWM") - before)
            if _events:
                found = f"executed: {_events[0]}"
            elif seconds > SECONDS:
                found = f"slow: {seconds:.1f} s"
            elif grown > 4 * case.size + BYTES:
                found = f"memory: {grown} bytes for {case.size}"
            if found not in ("valid", "refused") and kept:
                shutil.copytree(folder, Path(kept) / f"{number}", dirs_exist_ok=True)
            shutil.rmtree(folder)
            answer = {"number": number, "kind": case.kind, "found": found, "seconds": round(seconds, 2), "bytes": grown}
            print(json.dumps(answer), file=answers, flush=True)
            if done % 500 == 499:
                jax.clear_caches()


# The parent.


def _start(seed: int) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--work", "--seed", str(seed)]
    worker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert worker.stdout is not None
    if worker.stdout.readline() != "ready\n":
        raise RuntimeError(f"a worker did not start: {' '.join(command)}")
    return worker


def attack(numbers: Iterator[int], seed: int, results: list[dict[str, Any]], keep: str | None) -> None:
    """Have a worker read cases, and another one when it died or gave no answer."""
    worker = _start(seed)
    for number in numbers:
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            print(json.dumps([number, keep]), file=worker.stdin, flush=True)
            answered = bool(select.select([worker.stdout], [], [], PATIENCE)[0])
            line = worker.stdout.readline() if answered else ""
        except BrokenPipeError:
            answered, line = True, ""
        if line:
            results.append(json.loads(line))
            continue
        what = f"crash: the process ended with {worker.wait()}" if answered else f"hang: no answer in {PATIENCE} s"
        _end(worker)
        results.append({"number": number, "kind": "unknown", "found": what, "seconds": 0.0, "bytes": 0})
        worker = _start(seed)
    _end(worker)


def _end(worker: subprocess.Popen[str]) -> None:
    worker.kill()
    with suppress(BrokenPipeError):
        worker.communicate()


def run(
    cases: int, *, seed: int, workers: int, first: int = 0, keep: str | None = None, minutes: float = math.inf
) -> dict[str, Any]:
    """What came of the cases, or of those begun within so many minutes, by kind; the failures one by one."""
    started, lock, going = time.monotonic(), threading.Lock(), count(first)

    def numbers() -> Iterator[int]:
        while True:
            with lock:
                number = next(going)
            if number >= first + cases or time.monotonic() - started > 60 * minutes:
                return
            yield number

    results: list[dict[str, Any]] = []
    threads = [threading.Thread(target=attack, args=(numbers(), seed, results, keep)) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    failures = [each for each in results if each["found"] not in ("valid", "refused")]
    kinds = {kind: Counter(each["found"].split(":")[0] for each in results if each["kind"] == kind) for kind in SHARES}
    return {
        "cases": len(results),
        "seed": seed,
        "minutes": round((time.monotonic() - started) / 60, 1),
        "kinds": {kind: dict(sorted(found.items())) for kind, found in kinds.items()},
        "longest case, s": max((each["seconds"] for each in results), default=0),
        "most memory, MB": round(max((each["bytes"] for each in results), default=0) / 1e6),
        "failures": sorted(failures, key=lambda each: each["number"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after so many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case, to go on where one ended")
    parser.add_argument("--seed", type=int, default=int(time.time() // 86400), help="by default that of the day")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--only", type=int, help="the case of this number")
    parser.add_argument("--keep", help="a folder for the files of failures")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.seed)
        return 0
    one = given.only is not None
    report = run(
        1 if one else given.cases,
        seed=given.seed,
        workers=1 if one else given.workers,
        first=given.only if one else given.first,
        keep=given.keep,
        minutes=given.minutes,
    )
    print(json.dumps(report, indent=2))
    short = report["cases"] < (1 if one else given.cases) and given.minutes == math.inf
    return 1 if report["failures"] or short else 0


if __name__ == "__main__":
    sys.exit(main())
