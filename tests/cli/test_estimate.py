"""`llama-jax estimate` as a user meets it, and as a process really takes memory."""

import json
import os
import subprocess
import sys

import check_estimate
import pytest

from llama_jax import cache_bytes, parameter_count, preset
from llama_jax.checkpoints.huggingface import config_to_dict

PROGRAM = [sys.executable, "-c", "from llama_jax.cli import main; main()", "estimate"]
CONFIG = preset("stories-260k")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    # Another platform and number of devices than asked for: the command simulates its own.
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "JAX_PLATFORMS": "cuda",
        "JAX_NUM_CPU_DEVICES": "1",
        "COLUMNS": "200",
    }

    def run(*arguments):
        return subprocess.run([*PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=600, env=environment)

    return run


def test_training_as_a_table(run):
    done = run("stories-260k", "--batch", 4, "--length", 32, "--mode", "train", "--mesh", "fsdp=2,data=2")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "compiling train step for 4 simulated devices...\n"
    lines = done.stdout.splitlines()
    assert lines[0] == "stories-260k · train · batch 4 x 32 · float32 · remat full · data=2,fsdp=2,tensor=1"
    assert lines[1] == "260,032 parameters · cache 1,280 bytes per token"
    assert " ".join(lines[3].split()) == "GB per device train step train step, all 4"
    table = {line[:28].strip(): [float(cell) for cell in line[28:].split()] for line in lines[4 : lines.index("", 4)]}
    assert [*table][:4] == ["parameters", "gradients", "optimizer state (AdamW)", "activations and temporaries"]
    assert table["parameters"] == [0.001, 0.002]  # two copies of the model
    assert [*table][-1] == "total"
    assert table["total"][0] == pytest.approx(sum(cells[0] for cells in table.values()) / 2, abs=0.003)
    assert "XLA plans for CPU devices" in lines[-1]


def test_decoding_as_json(run):
    done = run("stories-260k", "--batch", 4, "--length", 300, "--mesh", "fsdp=2,tensor=2", "--json", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["mesh"] == {"data": 1, "fsdp": 2, "tensor": 2}
    assert found["devices"] == 4
    assert found["parameter_count"] == parameter_count(CONFIG)
    assert found["cache_bytes_per_token"] == cache_bytes(CONFIG, 1, 1, "bfloat16")
    assert found["remat"] is None
    programs = found["bytes_per_device"]
    assert list(programs) == ["prefill", "grow", "decode"]
    for parts in programs.values():
        assert parts["total"] == sum(size for part, size in parts.items() if part != "total")
    # A cache of 512 slots, the next power of two; and the lengths of the two rows that a device has.
    assert programs["decode"]["cache"] == cache_bytes(CONFIG, 4, 512, "bfloat16") // 4 + 2 * 4
    assert found["peak_per_device"] == max(parts["total"] for parts in programs.values())
    assert found["peak_of_mesh"] == 4 * found["peak_per_device"]


def test_a_config_is_enough(run, tmp_path):
    """No weights, in the folder or beside the file that is named."""
    (tmp_path / "config.json").write_text(json.dumps(config_to_dict(CONFIG)))
    for path in (tmp_path, tmp_path / "config.json"):
        done = run(path, "--batch", 1, "--length", 32, "--mode", "train", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["parameter_count"] == parameter_count(CONFIG)


def test_a_model_file_is_enough(run, stories_folder):
    done = run(stories_folder / "stories260K.bin", "--batch", 1, "--length", 32, "--mode", "train", "--json")
    assert json.loads(done.stdout)["parameter_count"] == parameter_count(CONFIG)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-9"], "'llama-9' is neither a preset nor a path; the presets are llama-7b, "),
        (["stories-260k", "--mesh", "banana"], "'banana' is not axis=size; write it as data=2,fsdp=4,tensor=1"),
        (["stories-260k", "--mesh", "tensor=8"], "n_kv_heads=4 cannot be split over tensor=8; 1, 2, 4 would do"),
        (["stories-260k", "--mesh", "data=3"], "batch=4 cannot be split over data*fsdp=3; 1, 2, 4 would do"),
        (["stories-260k", "--mesh", "data=99999"], "beyond the 16384 that can be simulated"),
        (["stories-260k", "--batch", "0"], "batch=0 must be a positive whole number"),
        (["stories-260k", "--length", "-5"], "length=-5 must be a positive whole number"),
        (["stories-260k", "--length", "1000000000", "--mode", "train"], "length=1000000000 are more than XLA can plan for"),
        (["stories-260k", "--length", "513"], "length=513 exceeds the model's context of 512"),
        (["stories-260k", "--remat", "full"], "--remat full is for --mode train"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(run, arguments, message):
    defaults = ["--batch", 4, "--length", 32]
    done = run(*arguments[:1], *defaults, *arguments[1:])
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.startswith("llama-jax: error: ")
    assert done.stderr.count("\n") == 1


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv[1:] = ['estimate', '--help']\n"
        "from llama_jax.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'jax', 'numpy', 'flax', 'optax'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--mesh" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [check_estimate.CASES[i] for i in (0, 4, 7, 12)], ids=lambda case: f"{case.program} {case.mesh}"
)
def test_the_estimate_is_what_a_process_takes(case):
    assert check_estimate.check(case)["ratio"] == pytest.approx(1, abs=0.1)


@pytest.mark.slow
def test_405_billion_parameters_on_512_devices(run):
    """Of no device is anything allocated: the shares of all add up to 6 TB."""
    done = run("llama-3.1-405b", "--mode", "train", "--mesh", "fsdp=64,tensor=8", "--batch", 512, "--length", 4096, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["parameter_count"] == 405_853_388_800
    step = found["bytes_per_device"]["train step"]
    assert step["parameters"] == step["gradients"] == pytest.approx(4 * found["parameter_count"] / 512, rel=0.01)
