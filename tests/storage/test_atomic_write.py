"""What is written is there whole or not at all: killed, failing, on a full disk, and beside others that write."""

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from llama_jax.errors import CheckpointError, UserError
from llama_jax.storage import atomic_write
from llama_jax.storage.atomic_write import write_atomically

OLD, NEW = "the old " * 50, "the new " * 50


def write(path: Path, text: str, *, folder: bool) -> None:
    with write_atomically(path, folder=folder) as target:
        for name in ("a", "b") if folder else ("",):
            (target / name if name else target).write_text(text)


def read(path: Path) -> set[str]:
    return {file.read_text() for file in (path.iterdir() if path.is_dir() else [path])}


def test_an_error_leaves_what_was_there(tmp_path):
    for folder in (False, True):
        path = tmp_path / "parent" / str(folder)
        with pytest.raises(ZeroDivisionError), write_atomically(path, folder=folder):
            raise ZeroDivisionError
        assert not list(tmp_path.iterdir()), "nor the folder that was made for it"
        write(path, OLD, folder=folder)
        with pytest.raises(ZeroDivisionError), write_atomically(path, folder=folder):
            raise ZeroDivisionError
        assert read(path) == {OLD}
        write(path, NEW, folder=folder)
        assert read(path) == {NEW}
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
        atomic_write.remove(tmp_path / "parent")


def test_a_folder_is_not_replaced_by_a_file(tmp_path):
    write(tmp_path / "model", OLD, folder=True)
    with pytest.raises(UserError, match=r"model cannot be written \(Is a directory\); a folder has that name"):
        write(tmp_path / "model", NEW, folder=False)
    assert read(tmp_path / "model") == {OLD}
    assert os.listdir(tmp_path) == ["model"]


def test_all_is_on_the_disk_before_it_has_the_name_and_the_name_before_it_returns(tmp_path, monkeypatch):
    path, seen, fsync = tmp_path / "model", [], os.fsync

    def note(descriptor):
        seen.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    write(path, NEW, folder=True)
    assert sorted(seen[:2]) == [("a", False), ("b", False)]
    assert seen[2:] == [("new", False), (tmp_path.name, True)], "their folder, and the one above"


def test_a_failing_rename_is_taken_back(tmp_path, monkeypatch):
    """Where folders cannot be exchanged."""
    monkeypatch.setattr(atomic_write, "_exchange", lambda *_: False)
    path = tmp_path / "model"
    write(path, OLD, folder=True)
    rename = Path.rename

    def fail(self, to):
        if self.name == "new":
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(UserError, match=r"model cannot be written \(Input/output error\)$"):
        write(path, NEW, folder=True)
    assert read(path) == {OLD}
    monkeypatch.setattr(Path, "rename", rename)
    write(path, NEW, folder=True)
    assert read(path) == {NEW}
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"No space left on device\); the disk is full: free some space"),
        (
            OSError("8388608 requested and 1045664 written"),
            r"requested and 1045664 written\); the disk is full",
        ),
        (OSError(errno.EFBIG, "File too large"), r"File too large\); file sizes are limited"),
        (
            OSError(errno.ENOTDIR, "Not a directory"),
            r"Not a directory\); a file is where a folder is needed: choose",
        ),
    ],
)
def test_a_full_disk_is_named_with_the_file_and_the_remedy(error, remedy, tmp_path):
    said = rf"{tmp_path}/model cannot be written \(.*{remedy}"
    with pytest.raises(CheckpointError, match=said), write_atomically(tmp_path / "model", raises=CheckpointError):
        raise error
    assert not os.listdir(tmp_path)


def run(code: str, *arguments: object) -> subprocess.Popen:
    program = "import sys; from pathlib import Path; from llama_jax.storage import atomic_write\n" + textwrap.dedent(code)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], stdin=pipe, stdout=pipe, env=environment)


SLOWLY = """
    path, folder = Path(sys.argv[1]), sys.argv[2] == "True"
    while True:
        with atomic_write.write_atomically(path, folder=folder) as target:
            print("begun", flush=True)
            for name in "ab" if folder else "a":
                with (target / name if folder else target).open("w") as file:
                    for _ in range(50):
                        file.write("the new ")
                        file.flush()
"""


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_killed_at_any_moment_it_is_the_old_or_the_new_and_nothing_piles_up(folder, tmp_path):
    """Of a process that writes the same again and again."""
    path, moments = tmp_path / "model", random.Random(0)
    write(path, OLD, folder=folder)
    for _ in range(10):
        with run(SLOWLY, path, folder) as process:
            assert process.stdout is not None
            for _ in range(moments.randrange(1, 4)):
                process.stdout.readline()
            threading.Event().wait(moments.random() * 0.003)
            process.kill()
        assert read(path) in ({OLD}, {NEW})
        assert len(os.listdir(tmp_path)) <= 2, "what the one before left is gone"
    write(path, NEW, folder=folder)
    assert read(path) == {NEW}
    assert os.listdir(tmp_path) == ["model"]


def test_killed_between_two_renames_the_old_comes_back(tmp_path):
    path = tmp_path / "model"
    write(path, OLD, folder=True)
    dying = """
        import os, signal
        atomic_write._exchange = lambda *_: False
        rename = Path.rename
        Path.rename = lambda self, to: os.kill(os.getpid(), signal.SIGKILL) if self.name == "new" else rename(self, to)
        with atomic_write.write_atomically(Path(sys.argv[1]), folder=True):
            pass
    """
    with run(dying, path) as process:
        assert process.wait() == -signal.SIGKILL
    assert not path.exists()
    assert len(os.listdir(tmp_path)) == 1
    write(tmp_path / "another", NEW, folder=False)
    assert sorted(os.listdir(tmp_path)) == ["another", "model"]
    assert read(path) == {OLD}


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_what_a_living_process_writes_stays(folder, tmp_path):
    code = """
        with atomic_write.write_atomically(Path(sys.argv[1]), folder=sys.argv[2] == "True") as target:
            (target / "a" if target.is_dir() else target).write_text("theirs")
            print("begun", flush=True)
            sys.stdin.readline()
    """
    with run(code, tmp_path / "theirs", folder) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        write(tmp_path / "ours", NEW, folder=folder)
        assert len(os.listdir(tmp_path)) == 2
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.wait() == 0
    assert sorted(os.listdir(tmp_path)) == ["ours", "theirs"]
    assert read(tmp_path / "theirs") == {"theirs"}


def test_names_of_others_stay(tmp_path):
    names = [
        ".model.partial",
        ".model.0123abcd.partial",
        "model.0123abcd.llama_jax-partial",
        ".x.0123abcd.llama_jax-partials",
        ".x.012.llama_jax-partial",
    ]
    for name in names:
        (tmp_path / name).touch()
    write(tmp_path / "model", NEW, folder=False)
    assert sorted(os.listdir(tmp_path)) == sorted([*names, "model"])
