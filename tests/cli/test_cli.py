"""The program as a user meets it: a process, its output, its exit code."""

import json
import re
import signal
import subprocess
import sys
import warnings

import jax
import pytest
from commands import PROGRAM, environment, error_of, process
from commands import run_here as run
from make_format_goldens import FORMATS

import llama_jax
from llama_jax.cli.jax_setup import use_compilation_cache


def test_version():
    assert process("--version").stdout == f"llama-jax {llama_jax.__version__}\n"


def test_quickstart():
    done = run("quickstart")
    assert (done.returncode, done.stdout) == (0, "(2, 16, 1000)\n")


def test_generate_streams_text_and_statistics(stories_folder):
    done = process("generate", "Once upon a time", "--model", stories_folder, "--temperature", 0, "--max-new-tokens", 40)
    assert done.returncode == 0, done.stderr
    expected = (stories_folder / "expected.txt").read_text()
    assert done.stdout.startswith("Once upon a time, there was a little girl named Lily.")
    assert expected.startswith(done.stdout.rstrip("\n"))
    for word in ("cpu", "float32", "attention", "compile", "prefill", "decode", "weights float32, 1.0 MB", "cache"):
        assert word in done.stderr


@pytest.mark.slow
def test_generate_beyond_the_context(stories_folder):
    """By another rope scaling, or through a window; neither ends at the model's context of 512, and the end is ignored."""
    arguments = ["generate", "Once upon a time", "--model", stories_folder, "--temperature", 0, "--max-new-tokens", 560]
    for options in (["--rope", "yarn:2"], ["--window", 64, "--sinks", 4, "--cache", "int8"]):
        done = run(*arguments, *options, "--ignore-eos", "--json")
        assert done.returncode == 0, done.stderr
        assert len(json.loads(done.stdout)["tokens"]) == 560


@pytest.mark.slow
def test_generate_as_json(stories_folder):
    arguments = ["generate", "Once", "--model", stories_folder / "stories260K.bin", "--max-new-tokens", 9, "--json"]
    done = run(*arguments, "--seed", 3, "--top-k", 20, "--top-p", 0.9, "--min-p", 0.01, "--repetition-penalty", 1.1)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["prompt"] == "Once"
    assert len(result["tokens"]) == len(result["logprobs"]) == 9
    assert result["finish_reason"] == "length"
    assert result["statistics"]["seed"] == 3
    assert result["statistics"]["weight_bytes"] == 260_032 * 4
    assert result["statistics"]["weights"] == "float32"
    again = run(*arguments, "--seed", 3, "--top-k", 20, "--top-p", 0.9, "--min-p", 0.01, "--repetition-penalty", 1.1)
    assert json.loads(again.stdout)["tokens"] == result["tokens"]


@pytest.mark.slow
def test_generate_with_a_draft_is_the_same(stories_folder):
    arguments = ["generate", "Once upon a time", "--model", stories_folder, "--max-new-tokens", 40, "--seed", 3, "--json"]
    expected = json.loads(run(*arguments).stdout)
    assert expected["statistics"]["draft"] is None
    for draft in ("prompt", "prompt:3", stories_folder, f"{stories_folder / 'stories260K.bin'}:2"):
        done = run(*arguments, "--draft", draft)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["tokens"] == expected["tokens"]
        statistics = found["statistics"]["draft"]
        assert statistics["draft"] == str(draft)
        assert statistics["passes"] >= 10
        assert 1 <= statistics["tokens_per_pass"] <= 16
        assert statistics["accepted"] <= statistics["drafted"]
    said = run(*arguments[:-1], "--draft", "prompt").stderr
    assert re.search(r"decode 40 tokens, [\d.]+/s \([\d.]+ tokens per pass, \d+ of \d+ drafted tokens accepted\)", said)


def test_generate_ends_at_a_stop_string(stories_folder):
    done = run("generate", "Once upon a time", "--model", stories_folder, "--temperature", 0, "--stop", "park", "--json")
    result = json.loads(done.stdout)
    assert result["text"].endswith("outside in the ")
    assert result["finish_reason"] == "stop"


def test_a_prompt_from_stdin_or_a_file_is_the_same(stories_folder, tmp_path):
    """What a shell cannot pass as an argument; the end of line at its end is none of its text."""
    prompt = "Once upon a time\r\nthere was  a cat"
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbf" + prompt.encode() + b"\r\n")
    options = ["--model", stories_folder, "--seed", 1, "--max-new-tokens", 12, "--json"]
    expected = json.loads(run("generate", prompt.replace("\r", ""), *options).stdout)
    for arguments in (["-"], ["--prompt-file", "-"], ["--prompt-file", tmp_path / "prompt.txt"]):
        done = run("generate", *arguments, *options, lines=prompt.encode() + b"\n")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert (found["prompt"], found["tokens"]) == (expected["prompt"], expected["tokens"])
    refused = run("generate", "-", *options, lines=b"caf\xff")
    assert refused.stderr.endswith("stdin, line 1 is not valid UTF-8; save the text as UTF-8\n")


@pytest.mark.slow
def test_a_file_of_prompts_is_a_batch_whose_rows_are_what_each_is_alone(stories_folder, tmp_path):
    prompts = ["Once upon a time", "She said that she was", "Once upon a time"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n".join(json.dumps({"prompt": prompt, "id": 1}) for prompt in prompts))
    options = ["--model", stories_folder, "--max-new-tokens", 14, "--stop", "she", "--temperature", 1.3]
    done = run("generate", "--prompt-file", file, *options, "--seed", 5, "--batch", 2)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["prompt"] for row in found] == prompts
    assert [row["seed"] for row in found] == [5, 6, 7]
    assert found[0]["tokens"] != found[2]["tokens"]
    for row in found:
        alone = json.loads(run("generate", row["prompt"], *options, "--seed", row["seed"], "--json").stdout)
        assert {name: alone[name] for name in row if name not in ("seed", "logprobs")} == {
            name: value for name, value in row.items() if name not in ("seed", "logprobs")
        }
    assert "prefill" in done.stderr


def test_a_missing_backend_is_one_line(stories_folder):
    done = process("generate", "Once", "--model", stories_folder, JAX_PLATFORMS="cuda")
    assert done.returncode == 2
    assert "JAX finds no device" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_terminal_that_cannot_show_a_character():
    done = process("estimate", "stories-260k", "--batch", 1, "--length", 8, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "stories-260k ? decode ? batch 1 x 8" in done.stdout


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            MemoryError("Unable to allocate 3.00 TiB\nfor an array"),
            "the machine's memory is too small (Unable to allocate 3.00 TiB for an array); try --dtype bfloat16",
        ),
        (
            ValueError('Invalid value "x" for JAX flag jax_num_cpu_devices'),
            'Invalid value "x" for JAX flag jax_num_cpu_devices; correct or unset the environment variable of this name',
        ),
    ],
)
def test_what_a_library_says_is_one_line_with_a_remedy(monkeypatch, error, said):
    monkeypatch.setattr("llama_jax.cli.setup.Quickstart.run", failing(error))
    done = run("quickstart")
    assert error_of(done) == f"llama-jax: error: {said}\n"


def test_the_remedy_for_a_small_memory_is_the_commands_own(monkeypatch):
    monkeypatch.setattr("llama_jax.cli.train.Train.run", failing(MemoryError("full")))
    assert "; try dtype=bfloat16 or a smaller batch\n" in run("train", "tiny", "--workdir", "runs").stderr


def failing(error):
    def fail(self):
        raise error

    return fail


def test_a_current_folder_that_is_gone_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    done = run("convert", FORMATS / "meta-1", "out.gguf")
    assert error_of(done) == "llama-jax: error: the current folder has been removed; change to one that exists\n"


@pytest.mark.parametrize("arguments", [["generate"], ["generate", "x", "--modle", "y"], []])
def test_wrong_usage_exits_with_2_and_no_traceback(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("end", ["interrupt", pytest.param("closed pipe", marks=pytest.mark.slow)])
def test_ctrl_c_and_a_closed_pipe_end_cleanly(stories_folder, end):
    arguments = ["generate", "Once upon a time", "--model", str(stories_folder), "--max-new-tokens", "500"]
    with subprocess.Popen(
        [*PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), bufsize=0
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4) == b"Once"
        if end == "interrupt":
            process.send_signal(signal.SIGINT)
            process.stdout.read()
        else:
            process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode in ({130} if end == "interrupt" else {0, 1})


@pytest.mark.parametrize(
    ("closed", "code", "said"),
    [
        pytest.param(
            ">&-",
            2,
            "llama-jax: error: stdout cannot be written (Bad file descriptor); it is closed",
            marks=pytest.mark.slow,
        ),
        ("> /dev/full", 2, "llama-jax: error: stdout cannot be written (No space left on device); the disk is full"),
    ],
)
def test_a_stdout_that_is_closed_or_full_is_no_traceback(closed, code, said, stories_folder):
    arguments = ["inspect", str(stories_folder)]
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *PROGRAM, *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment())
    assert done.returncode == code
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == (1 if said else 0)


def test_a_cache_folder_that_cannot_be_written_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    with warnings.catch_warnings():
        use_compilation_cache()
    said = capsys.readouterr().err
    assert said.startswith("llama-jax: compiled programs are not cached: ")
    assert "(Not a directory); set JAX_COMPILATION_CACHE_DIR to another folder" in said
    assert said.count("\n") == 1


@pytest.mark.slow
def test_flags_are_set_before_jax_starts():
    """In place of an accelerator: what is set for a platform, and what this version of XLA does not have."""
    code = """
import os, sys
from llama_jax.inference import xla_flags as flags
from llama_jax.cli.jax_setup import start_backend
known, unknown = flags.Flag("KNOWN", "KNOWN", "1", False), flags.Flag("XLA_FLAGS", "xla_no_such_flag", "1")
flags.PLATFORM_FLAGS = {"cpu": (known, unknown)}
start_backend(training=True)
print(os.environ.get("KNOWN"), os.environ.get("XLA_FLAGS", ""))
"""

    def run(**more):
        command = [sys.executable, "-c", code]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment(**more))

    done = run(XLA_FLAGS="")
    assert (done.returncode, done.stdout.split()) == (0, ["1"]), done.stderr
    assert done.stderr.strip() == "llama-jax: flags that this version of XLA does not have are omitted: xla_no_such_flag"
    done = run(XLA_FLAGS="", LLAMA_JAX_FLAGS="off")
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["None"], "")


@pytest.mark.slow
def test_generate_over_a_mesh_gives_the_same_text():
    """Its one key/value head is copied for the second device."""
    arguments = ["generate", "Once upon a time", "--dtype", "float32", "--seed", 3, "--max-new-tokens", 12, "--json"]
    alone, divided = (process(*arguments, *mesh, JAX_NUM_CPU_DEVICES=2) for mesh in ((), ("--mesh", "tensor=2")))
    assert divided.returncode == 0, divided.stderr
    one, two = json.loads(alone.stdout), json.loads(divided.stdout)
    assert two["tokens"] == one["tokens"]
    assert (one["statistics"]["mesh"], two["statistics"]["mesh"]) == ("", "data=1,fsdp=1,tensor=2")
    assert "2.4M parameters" in divided.stderr  # the model's own, not those of the copies


@pytest.mark.slow
def test_generate_compiles_nothing_more_than_compile(tmp_path):
    cache = {"JAX_COMPILATION_CACHE_DIR": tmp_path}
    done = process("compile", "--max-tokens", "16", **cache)
    assert done.returncode == 0
    programs = sorted(path.name for path in tmp_path.iterdir())
    assert done.stdout.startswith(f"{len(programs)} programs made, ")
    for temperature in ("0", "0.8"):  # two programs
        done = process("generate", "Once", "--max-new-tokens", "9", "--temperature", temperature, **cache)
        assert done.returncode == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == programs
    assert process("compile", "--max-tokens", "16", **cache).stdout.startswith("0 programs made, 0.0 MB")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_COMPILATION_CACHE_DIR": "s3://bucket/programs"}, "compile needs JAX's compilation cache"),
        ({"JAX_COMPILATION_CACHE_DIR": __file__}, "cannot be written"),
    ],
)
def test_a_cache_that_compile_cannot_fill_is_refused(variables, message):
    done = process("compile", **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr.splitlines()[-1]
