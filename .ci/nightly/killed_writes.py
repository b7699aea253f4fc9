"""Writing that is killed, or finds no room, at random moments, and the next run: see `--help`.

A case is one thing that is written (`save` and `convert` in every format, a corpus in its cache, the checkpoints of a
training run), over an old one or where there was none, and one of:

    kill       SIGKILL before the n-th time that a file is opened, flushed, renamed or removed, or some time after that; up
               to three processes one after the other die like this
    full       a disk with some room, but mostly not enough (a tmpfs; where none can be mounted, a largest size of files)
    read-only  a disk that cannot be written to (only where a tmpfs can be mounted)

Afterwards what is there is the old whole or the new whole; no more than two entries are left over; an error is one line
for the user that advises no deletion; and the next run, without cleaning by hand, gives what it gives where nothing went
wrong, and leaves nothing else.

Prints one JSON object, and exits with 1 where there was a failure. A case is remade from the seed and its number alone
(`--only`), as far as threads and the clock allow.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2] / "tests"
FORMATS = {"safetensors": "model", "gguf": "model.gguf", "llama2c": "model.bin", "orbax": "model"}
OPERATIONS = (*(f"{verb} {format}" for verb in ("save", "convert") for format in FORMATS), "corpus", "checkpoints")
WAYS = ("kill", "full") * 4 + ("read-only",)  # round after round of the operations
PATIENCE = 120  # seconds for a process; then it hangs
LEFTOVERS = 2  # entries at most beside what belongs there, however many processes died
DISK = 64 << 20
EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
ADVICE = re.compile(r"\b(remove|delete|rm)\b", re.IGNORECASE)
REMEDIES = ("the disk is full", "file sizes are limited", "use a folder that you may write to", "write elsewhere")


# What is written, in a process of its own.


class Work:
    """What is read, and how each thing is written; in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before = {operation: folder / "before" / operation for operation in OPERATIONS}

    def perform(self, operation: str, folder: Path, which: str = "new") -> None:
        """Write the thing into a folder, over what is there of it."""
        import llama_jax

        source = self.folder / which
        verb, _, format = operation.partition(" ")
        if verb == "save":
            llama_jax.save(folder / FORMATS[format], *llama_jax.load(source), format=format, overwrite=True)  # type: ignore[arg-type]
        elif verb == "convert":
            llama_jax.convert(source, folder / FORMATS[format], format=format, overwrite=True)  # type: ignore[arg-type]
        elif verb == "corpus":
            from byte_tokenizer import ByteTokenizer

            from llama_jax.data import open_corpus

            open_corpus(self.folder / "corpus.jsonl", ByteTokenizer(), cache=folder)  # type: ignore[arg-type]
        else:
            from mortal_run import recipe

            run = replace(recipe(), steps=8, save_every=2, evaluate_every=4)
            llama_jax.train(run, folder / "run", self.folder / "words.txt", resume=True)

    def contents(self, operation: str, folder: Path) -> Any:
        """What a reader finds there: a digest or None, and of a run a digest for every step."""
        import llama_jax

        if operation == "corpus":
            from llama_jax.data.corpus_file import read_corpus

            return [read_corpus(path)[0].digest for path in sorted(folder.glob("*.corpus"))]
        if operation == "checkpoints":
            from llama_jax.formats.step_dirs import steps_in

            checkpoints = folder / "run" / "checkpoints"
            return {str(step): _digest(*llama_jax.load(checkpoints / str(step))) for step in steps_in(checkpoints)}
        path = folder / FORMATS[operation.partition(" ")[2]]
        return _digest(*llama_jax.load(path)) if path.exists() else None

    def write_corpus_text(self, which: str) -> None:
        rng = random.Random(which)
        words = [" ".join(rng.choices(["a", "llama", "ate", "grass", "and", "slept"], k=40)) for _ in range(2000)]
        (self.folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words))

    def write_sources(self) -> dict[str, Any]:
        import make_goldens
        import numpy as np
        import vocabularies
        from conftest import params_of
        from make_format_goldens import SMALL

        import llama_jax
        from llama_jax.tokenizers import load_tokenizer

        tokenizer = load_tokenizer(vocabularies.write(self.folder / "vocabulary", "sentencepiece"))
        config = replace(SMALL, vocab_size=384, dim=64, hidden_dim=96)
        for seed, which in enumerate(("old", "new")):
            tensors = make_goldens.random_tensors(config)
            tensors = {name: np.roll(tensor, seed) for name, tensor in tensors.items()}
            llama_jax.save(self.folder / which, config, params_of(config, tensors), tokenizer)
        rng = random.Random(0)
        (self.folder / "words.txt").write_text(" ".join(rng.choices(["the", "llama", "ate", "grass", "and"], k=900)))
        self.write_corpus_text("old")
        return {}

    def prepare(self, operation: str) -> dict[str, Any]:
        """Write the old thing and, over a copy of it, the new one; tell what both are, and how many events there were."""
        before, after = self.before[operation], self.folder / "after" / operation
        before.mkdir(parents=True)
        if operation == "checkpoints":
            _stop_at(4)
        fresh = watch(before, lambda number: None)
        self.perform(operation, before, "old")
        where_none_was = fresh()
        if operation == "corpus":
            self.write_corpus_text("new")
        old = self.contents(operation, before)
        shutil.copytree(before, after)
        events = watch(after, lambda number: None)
        started = time.perf_counter()
        self.perform(operation, after)
        seconds, count = time.perf_counter() - started, events()
        return {
            "old": old,
            "new": self.contents(operation, after),
            "events": count,
            "events of a fresh one": where_none_was + (count if operation == "checkpoints" else 0),
            "seconds": seconds,
            "listing": listing(after),
            "bytes": _size(after),
            "largest": max(path.stat().st_size for path in after.rglob("*")),
        }

    def go_on(self, operation: str, folder: Path) -> dict[str, Any]:
        """What is found after the accident, and what the next run makes of it."""
        import warnings

        from llama_jax.storage.atomic_write import remove_leftovers

        warnings.simplefilter("always")
        answer = {"found": self.contents(operation, folder), "left": listing(folder)}
        self.perform(operation, folder)
        if operation == "checkpoints":
            lines = (folder / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
            assert any('"kind": "train"' in line for line in lines)
        if operation == "corpus":  # one that is whole is not written again, and only who writes removes leftovers
            remove_leftovers(folder)
        return answer | {"next": self.contents(operation, folder), "left next": listing(folder)}

    def fail(self, operation: str, folder: Path, limit: int | None) -> dict[str, Any]:
        """Write, with no room for it; what is said, and what is found while there is still none."""
        import resource

        from llama_jax.errors import UserError

        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        error = None
        try:
            self.perform(operation, folder)
        except UserError as refusal:
            error = str(refusal)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        return {"error": error, "found": self.contents(operation, folder), "left": listing(folder)}

    def die(self, operation: str, folder: Path, number: int, delay: float) -> dict[str, Any]:
        """Write, and be killed at an event or `delay` seconds after it; or live, where there are fewer events."""

        def happened(now: int) -> None:
            if now == number and delay:
                signal.setitimer(signal.ITIMER_REAL, delay)  # ends the process as SIGKILL does: nothing handles it
            elif now == number:
                os.kill(os.getpid(), signal.SIGKILL)

        watch(folder, happened)
        self.perform(operation, folder)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return {}


def _digest(config: Any, params: Any, tokenizer: Any) -> str:
    import jax
    import numpy as np

    from llama_jax.data.load_corpus import examine

    found = sha256(repr(None if tokenizer is None else examine(tokenizer).fingerprint).encode())
    for leaf in jax.tree.leaves(params):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def _stop_at(step: int) -> None:
    """Have the training of this process asked to stop when it saves that step."""
    from llama_jax.runs.checkpoint_manager import CheckpointManager

    save = CheckpointManager.save

    def stopped(self: CheckpointManager, at: int, *arguments: Any, **options: Any) -> None:
        save(self, at, *arguments, **options)
        if at == step:
            CheckpointManager.save = save  # type: ignore[method-assign]
            signal.raise_signal(signal.SIGTERM)

    CheckpointManager.save = stopped  # type: ignore[method-assign,assignment]


def watch(folder: Path, happened: Callable[[int], None]) -> Callable[[], int]:
    """Call `happened` with 1, 2, ... before each change to files below a folder that Python makes; gives their count."""
    below, count, fsync = f"{folder.resolve()}{os.sep}", 0, os.fsync

    def note(path: object) -> None:
        nonlocal count
        if isinstance(path, str | bytes | os.PathLike) and os.path.abspath(os.fsdecode(path)).startswith(below):
            count += 1
            happened(count)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            note(arguments[0])
        elif event in EVENTS:
            # `shutil.rmtree` names files by a descriptor of their folder; it is in a folder below.
            within = isinstance(arguments[-1], int) and arguments[-1] >= 0
            note(below + "in" if within else arguments[0])
        elif event == "ctypes.dlsym" and arguments[1] == "renameat2":
            note(below + "both")

    def flush(descriptor: int) -> None:
        note(os.readlink(f"/proc/self/fd/{descriptor}") + os.sep)
        fsync(descriptor)

    sys.addaudithook(audit)
    os.fsync = flush  # type: ignore[assignment]
    return lambda: count


def listing(folder: Path) -> list[str]:
    """The names in a folder, and in that of a run and of its checkpoints."""
    places = (folder, folder / "run", folder / "run" / "checkpoints")
    return sorted(str(path.relative_to(folder)) for place in places if place.is_dir() for path in place.iterdir())


def _size(folder: Path) -> int:
    """Bytes that a folder takes on a disk of pages."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*"))


def in_child(work: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What `work` returns in a forked process, with its "status" and what it "said" on stderr; only these where it died."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as said:
        child = os.fork()
        if child == 0:
            try:
                os.close(reader)
                os.dup2(said.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                answer = work(*arguments)
            except BaseException as error:
                answer = {"raised": f"{type(error).__name__}: {error!s:.300}"}
                traceback.print_exc()
            with os.fdopen(writer, "w") as file:
                json.dump(answer, file)
            os._exit(0)
        os.close(writer)
        text, deadline = b"", time.monotonic() + PATIENCE
        while (left := deadline - time.monotonic()) > 0:
            if select.select([reader], [], [], left)[0]:
                piece = os.read(reader, 1 << 16)
                text += piece
                if not piece:
                    break
        else:
            os.kill(child, signal.SIGKILL)
        os.close(reader)
        status = os.waitpid(child, 0)[1]
        said.seek(0)
        code = "hang" if left <= 0 else os.waitstatus_to_exitcode(status)
        return {"status": code, "said": said.read().decode(errors="replace"), **(json.loads(text) if text else {})}


# The cases.


class Disk:
    """A small disk of one's own; None for `folder` where none can be mounted."""

    def __init__(self, place: Path) -> None:
        place.mkdir()
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", place], stderr=subprocess.DEVNULL)
        self.folder = place if mounted.returncode == 0 else None

    def leave_room(self, count: int) -> Path:
        """Take all but so many bytes; the file that takes them."""
        assert self.folder is not None
        filler, free = self.folder / "filler", os.statvfs(self.folder)
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, free.f_bavail * free.f_bsize - count))
        return filler

    def allow_writing(self, allowed: bool) -> None:
        assert self.folder is not None
        subprocess.run(["mount", "-o", f"remount,{'rw' if allowed else 'ro'}", self.folder], check=True)


class Cases:
    def __init__(self, folder: Path, operations: set[str], disk: Disk) -> None:
        self.folder, self.work, self.disk = folder, Work(folder), disk
        self.moments: Counter[str] = Counter()
        _sound(in_child(self.work.write_sources))
        self.known = {name: _sound(in_child(self.work.prepare, name)) for name in OPERATIONS if name in operations}

    def run(self, seed: int, number: int) -> dict[str, Any]:
        """One case: what it was, and what was wrong about it."""
        rng = random.Random(f"{seed} {number}")
        operation, way = OPERATIONS[number % len(OPERATIONS)], WAYS[number // len(OPERATIONS) % len(WAYS)]
        if way == "read-only" and self.disk.folder is None:
            way = "full"
        fresh = rng.random() < 0.3
        place = self.folder if way == "kill" or self.disk.folder is None else self.disk.folder
        folder = place / "case"
        shutil.rmtree(folder, ignore_errors=True)
        if fresh:
            folder.mkdir()
        else:
            shutil.copytree(self.work.before[operation], folder)
        case = {"number": number, "operation": operation, "way": way, "fresh": fresh}
        wrong = getattr(self, f"_{way.replace('-', '_')}")(case, folder, rng)
        after = in_child(self.work.go_on, operation, folder)
        wrong += self._judge_next(operation, fresh, after)
        shutil.rmtree(folder)
        return case | {"wrong": wrong}

    def _kill(self, case: dict[str, Any], folder: Path, rng: random.Random) -> list[str]:
        known = self.known[case["operation"]]
        wrong, case["moments"] = [], []
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            pause = known["seconds"] / known["events"]
            last = known["events of a fresh one" if case["fresh"] else "events"]
            moment = rng.randint(1, last), rng.choice([0.0, 0.0, rng.random() * 4 * pause])
            died = in_child(self.work.die, case["operation"], folder, *moment)
            case["moments"].append([*moment, died["status"]])
            if died["status"] not in (-signal.SIGKILL, -signal.SIGALRM, 0) or "raised" in died:
                wrong.append(f"the process that was to die: {died}")
            self.moments["kill"] += 1
            self.moments["kill, and it had ended"] += died["status"] == 0
        return wrong

    def _full(self, case: dict[str, Any], folder: Path, rng: random.Random) -> list[str]:
        known = self.known[case["operation"]]
        room, limit, filler = int(rng.random() ** 1.5 * 1.1 * known["bytes"]), None, None
        if self.disk.folder is None:
            limit = room = rng.randrange(known["largest"])
        else:
            filler = self.disk.leave_room(room)
        case["room"] = room
        failed = in_child(self.work.fail, case["operation"], folder, limit)
        if filler is not None:
            filler.unlink()
        self.moments["full"] += 1
        self.moments["full, and there was room"] += "error" in failed and failed["error"] is None
        return self._judge_failure(case, failed)

    def _read_only(self, case: dict[str, Any], folder: Path, rng: random.Random) -> list[str]:
        self.disk.allow_writing(False)
        try:
            failed = in_child(self.work.fail, case["operation"], folder, None)
        finally:
            self.disk.allow_writing(True)
        self.moments["read-only"] += 1
        wrong = [] if failed.get("error") else ["nothing was said of a disk that is only read"]
        return wrong + self._judge_failure(case, failed)

    def _judge_failure(self, case: dict[str, Any], failed: dict[str, Any]) -> list[str]:
        if "error" not in failed:
            return [f"no answer: {failed}"]
        error, wrong = failed["error"], []
        case["error"] = error
        if error is not None and ("\n" in error or len(error) > 2000 or ADVICE.search(error)):
            wrong.append(f"not one line without advice to delete: {error}")
        if error is not None and not any(remedy in error for remedy in REMEDIES):
            wrong.append(f"no remedy: {error}")
        if "Traceback" in failed["said"] or ADVICE.search(failed["said"]):
            wrong.append(f"it said {failed['said'][-2000:]}")
        known = self.known[case["operation"]]
        if not self._is_whole(case["operation"], case["fresh"], failed["found"]):
            wrong.append(f"neither the old nor the new: {failed['found']}")
        beside = set(failed["left"]) - set(known["listing"]) - _old_names(known)
        if beside:
            wrong.append(f"left by a process that had time to clear up: {sorted(beside)}")
        return wrong

    def _judge_next(self, operation: str, fresh: bool, after: dict[str, Any]) -> list[str]:
        if "left next" not in after:
            return [f"the next run: {after}"]
        known, wrong = self.known[operation], []
        if not self._is_whole(operation, fresh, after["found"]):
            wrong.append(f"neither the old nor the new: {after['found']} where {after['left']}")
        beside = set(after["left"]) - set(known["listing"]) - _old_names(known)
        if len(beside) > LEFTOVERS:
            wrong.append(f"left over: {sorted(beside)}")
        if after["next"] != known["new"]:
            wrong.append(f"the next run makes {after['next']} and not {known['new']}")
        if after["left next"] != known["listing"]:
            wrong.append(f"after the next run there are {after['left next']}, and should be {known['listing']}")
        if "Traceback" in after["said"] or ADVICE.search(after["said"]):
            wrong.append(f"the next run said {after['said'][-2000:]}")
        return wrong

    def _is_whole(self, operation: str, fresh: bool, found: Any) -> bool:
        known = self.known[operation]
        if operation != "checkpoints":
            nothing: Any = [] if operation == "corpus" else None
            return found in (nothing if fresh else known["old"], known["new"])
        steps = known["old"] | known["new"]
        return all(steps[step] == digest for step, digest in found.items()) and (fresh or max(found, default="0") >= "4")


def _old_names(known: dict[str, Any]) -> set[str]:
    """Checkpoints that the new run no longer keeps."""
    return {f"run/checkpoints/{step}" for step in known["old"]} if isinstance(known["old"], dict) else set()


def _sound(answer: dict[str, Any]) -> dict[str, Any]:
    if answer["status"] != 0 or "raised" in answer:
        raise RuntimeError(f"a case cannot be prepared: {answer}")
    return answer


def run(numbers: range, seed: int) -> dict[str, Any]:
    """What came of the cases; the failures one by one."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        _import(folder)
        disk = Disk(folder / "disk")
        try:
            cases = Cases(folder, {OPERATIONS[number % len(OPERATIONS)] for number in numbers}, disk)
            prepared = time.monotonic() - started
            results = []
            for number in numbers:
                results.append(cases.run(seed, number))
                if results[-1]["wrong"]:
                    print(json.dumps(results[-1]), file=sys.stderr, flush=True)
        finally:
            if disk.folder is not None:
                subprocess.run(["umount", disk.folder], check=True)
    return {
        "cases": len(results),
        "seed": seed,
        "moments": dict(sorted(cases.moments.items())),
        "disk": "RLIMIT_FSIZE" if disk.folder is None else "tmpfs",
        "seconds": round(time.monotonic() - started, 1),
        "seconds to prepare": round(prepared, 1),
        "events": {name: [known["events"], known["events of a fresh one"]] for name, known in cases.known.items()},
        "operations": dict(sorted(Counter(f"{each['operation']}, {each['way']}" for each in results).items())),
        "failures": [each for each in results if each["wrong"]],
        **({"case": results[0]} if len(results) == 1 else {}),
    }


def _import(folder: Path) -> None:
    """Import once what all processes need; JAX starts no threads before it computes, so they can be forked from this one."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "LLAMA_JAX_CACHE": str(folder / "cache"),
    }
    for folder in ("", "data", "runs", "tokenizers"):
        sys.path.append(str(HERE / folder))
    sys.path.insert(0, str(HERE.parent))
    import byte_tokenizer  # noqa: F401
    import conftest  # noqa: F401
    import make_format_goldens  # noqa: F401
    import mortal_run  # noqa: F401
    import vocabularies  # noqa: F401
    from orbax.checkpoint import v1  # noqa: F401

    import llama_jax.runs.loop  # noqa: F401


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--cases", type=int, default=450)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=int(time.time() // 86400), help="by default that of the day")
    parser.add_argument("--only", type=int, help="the case of this number")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    # Where this process has its own view of what is mounted, it may mount, and whatever happens nothing stays mounted.
    own = ["unshare", "--mount", "--map-root-user"]
    if (
        not given.inside
        and shutil.which("unshare")
        and subprocess.run([*own, "true"], stderr=subprocess.DEVNULL).returncode == 0
    ):
        os.execvp(own[0], [*own, sys.executable, __file__, *sys.argv[1:], "--inside"])
    first, count = (given.first, given.cases) if given.only is None else (given.only, 1)
    report = run(range(first, first + count), given.seed)
    print(json.dumps(report, indent=2))
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
