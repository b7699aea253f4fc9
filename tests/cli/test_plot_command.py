"""`llama-jax plot` as a user meets it."""

import errno
import json

import pytest
import tyro

from llama_jax.cli.train import Plot
from llama_jax.errors import UserError

LINE = {
    "kind": "train",
    "step": 1,
    "loss": 2.0,
    "learning_rate": 1e-3,
    "grad_norm": 1.0,
    "tokens_per_second": 9.0,
    "tokens": 8,
}


@pytest.fixture
def run(capsys):
    """Run the command in this process: what it prints on stdout and stderr."""

    def run(*arguments):
        tyro.cli(Plot, args=[*map(str, arguments)]).run()
        return capsys.readouterr()

    return run


@pytest.fixture
def folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [tmp_path / name for name in ("one", "two")]
    for folder in found:
        folder.mkdir()
        lines = [LINE | {"step": step, "tokens": 8 * step} for step in (1, 2, 3)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return found


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG\r\n")


def test_one_run_is_drawn_into_its_folder(run, folders):
    out, err = run(folders[0])
    assert (out, err) == (f"{folders[0] / 'curves.png'}\n", "")
    assert is_png(folders[0] / "curves.png")


@pytest.mark.slow
def test_several_runs_are_drawn_here(run, folders, tmp_path):
    out, _ = run(*folders, "--by", "tokens", "--log", "--smoothing", 0.5)
    assert out == "curves.png\n"
    assert is_png(tmp_path / "curves.png")


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("a.png", b"\x89PNG"),
        pytest.param("a.PDF", b"%PDF", marks=pytest.mark.slow),
        pytest.param("a.svg", b"<?xml", marks=pytest.mark.slow),
    ],
)
def test_output(run, folders, tmp_path, name, start):
    assert run(folders[0], "--output", tmp_path / name).out == f"{tmp_path / name}\n"
    assert (tmp_path / name).read_bytes().startswith(start)


def test_a_line_that_is_not_whole_is_said(run, folders):
    with (folders[1] / "metrics.jsonl").open("a") as file:
        file.write('{"kind":')
    err = run(*folders).err
    assert err == f"llama-jax: {folders[1] / 'metrics.jsonl'}: incomplete lines were skipped (line 4)\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one", "--output", "curves.jpg"], r"output=curves.jpg must end in .png, .pdf, .svg"),
        (["one", "--output", "two.png"], r"output=two.png is a folder, not a file"),
        (["."], r"holds no metrics.jsonl"),
        (
            ["one", "--output", "nowhere/curves.png"],
            r"output=nowhere/curves.png: the folder nowhere does not exist; create it",
        ),
    ],
)
def test_mistakes(run, folders, tmp_path, arguments, message):
    (tmp_path / "two.png").mkdir()
    with pytest.raises(UserError, match=message):
        run(*arguments)
    assert not list(tmp_path.rglob("curves.*"))


def test_a_picture_appears_whole_or_not_at_all(run, folders, monkeypatch):
    """A full disk is said with the picture's name, and what was there before stays."""

    class Figure:
        def savefig(self, path, format):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    folder = folders[0].parent / "pictures"
    folder.mkdir()
    picture = folder / "a.png"
    picture.write_bytes(b"older")
    monkeypatch.setattr("llama_jax.runs.plot.draw", lambda *_, **__: Figure())
    with pytest.raises(UserError, match=r"a\.png cannot be written \(No space left on device\); the disk is full"):
        run(folders[0], "--output", picture)
    assert [path.name for path in folder.iterdir()] == ["a.png"]
    assert picture.read_bytes() == b"older"
