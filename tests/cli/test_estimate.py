"""`llama-jax estimate` as a user meets it, and as a process really takes memory."""

import json
import re
from functools import partial
from pathlib import Path

import commands
import pytest
from commands import run_here
from process_memory import ProgramCase, estimate_ratio

from llama_jax import cache_bytes, load, parameter_count, preset
from llama_jax.formats.huggingface import config_to_dict
from llama_jax.model.cache import PAGE_SIZE
from llama_jax.model.lora import Lora, adapter_count
from llama_jax.model.trees import bytes_in_memory

CONFIG = preset("stories-260k")


run = partial(run_here, "estimate")
# With another platform and number of devices than asked for: the command simulates its own.
process = partial(commands.process, "estimate", JAX_PLATFORMS="cuda", JAX_NUM_CPU_DEVICES=1)


@pytest.mark.slow
def test_training_as_a_table():
    done = process("stories-260k", "--batch", 4, "--length", 32, "--mode", "train", "--mesh", "fsdp=2,data=2")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "compiling train step for 4 simulated devices...\n"
    lines = done.stdout.splitlines()
    assert lines[0] == "stories-260k · train · batch 4 x 32 · float32 · remat full · packed · data=2,fsdp=2,tensor=1"
    assert lines[1] == "260,032 parameters · cache 1,280 bytes per token"
    assert " ".join(lines[3].split()) == "GB per device train step train step, all 4"
    rows = [re.split("  +", line) for line in lines[4 : lines.index("", 4)]]
    table = {name: [float(cell) for cell in cells] for name, *cells in rows}
    assert [*table][:4] == ["parameters", "gradients", "optimizer state (AdamW)", "activations and temporaries"]
    assert table["parameters"] == [0.001, 0.002]  # two copies of the model
    assert [*table][-1] == "total"
    assert table["total"][0] == pytest.approx(sum(cells[0] for cells in table.values()) / 2, abs=0.003)
    assert "XLA plans for CPU devices" in lines[lines.index("", 4) + 2]
    assert "H200" not in done.stdout


@pytest.mark.slow
def test_adapters_take_no_state_of_the_model():
    """Beside bfloat16 weights, AdamW's two numbers and the gradients of what is learned alone."""
    shape = "stories-260k", "--batch", 2, "--length", 32, "--mode", "train", "--dtype", "bfloat16", "--json"
    found = json.loads(run(*shape, "--lora", 4).stdout)
    learned, memory = adapter_count(CONFIG, Lora(rank=4)), found["bytes_per_device"]["train step"]
    assert memory["parameters"] == 2 * parameter_count(CONFIG) + 4 * learned
    assert memory["optimizer"] == 8 * learned + 4
    assert found["lora"] == 4


@pytest.mark.slow
def test_attention_changes_the_plan():
    totals = {}
    for way in ("reference", "blockwise"):
        done = run("stories-260k", "--batch", 4, "--length", 512, "--mode", "train", "--attention", way, "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["attention"] == way
        totals[way] = found["peak_per_device"]
    scores = 4 * CONFIG.n_heads * 512 * 512 * 4
    assert totals["reference"] > totals["blockwise"] + scores / 2  # all scores of a layer at once


@pytest.mark.slow
def test_hardware_bounds_the_time():
    asked = ["stories-260k", "--batch", 4, "--length", 32, "--mode", "train", "--mesh", "fsdp=2,tensor=2"]
    asked += ["--dtype", "bfloat16"]
    table, found = process(*asked, "--hardware", "h200"), process(*asked, "--hardware", "h200", "--json")
    assert (table.returncode, found.returncode) == (0, 0), table.stderr + found.stderr
    lines = table.stdout.splitlines()
    assert any(line.startswith("H200 SXM: 989.5 TFLOP/s, memory 4.8 TB/s, links 450 GB/s between 8") for line in lines)
    assert any(line.endswith("% of its memory of 151.4 GB: it fits") for line in lines)
    assert "scratch" not in table.stdout  # of CPU kernels
    report = json.loads(found.stdout)
    assert report["fits"]
    assert report["hardware"]["network_bandwidth"] == 50e9
    compiled, least = report["rooflines"].values()
    assert compiled["compute"] == least["compute"] > 0
    assert compiled["exchange"] >= least["exchange"] > 0
    assert compiled["apart"] == pytest.approx(compiled["compute"] + compiled["memory"] + compiled["exchange"])
    assert 0 < compiled["mfu_apart"] <= compiled["mfu_overlapped"] < 1
    rows = report["exchanged"]["train step"]
    assert {(row["opcode"], *row["axes"]) for row in rows} >= {("all-gather", "fsdp"), ("all-reduce", "tensor")}
    assert all(row["sent"] >= row["sent_if_scattered"] > 0 for row in rows)
    assert sum(row["count"] for row in report["least_exchanged"] if row["what"].startswith("weights")) == 2 * CONFIG.n_layers


@pytest.mark.slow
def test_decoding_as_json():
    done = run("stories-260k", "--batch", 4, "--length", 300, "--mesh", "fsdp=2,tensor=2", "--json", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["mesh"] == {"data": 1, "fsdp": 2, "context": 1, "tensor": 2}
    assert found["devices"] == 4
    assert found["parameter_count"] == parameter_count(CONFIG)
    assert found["cache_bytes_per_token"] == cache_bytes(CONFIG, 1, 1, "bfloat16")
    assert found["remat"] is None
    programs = found["bytes_per_device"]
    assert list(programs) == ["prefill", "decode"]
    for parts in programs.values():
        assert parts["total"] == sum(size for part, size in parts.items() if part != "total")
    # A cache of 512 tokens, the next power of two; and of the two rows that a device has, the tables and lengths.
    assert programs["decode"]["cache"] == cache_bytes(CONFIG, 4, 512, "bfloat16") // 4 + 2 * 4 * (512 // PAGE_SIZE + 1)
    assert found["peak_per_device"] == max(parts["total"] for parts in programs.values())
    assert found["peak_of_mesh"] == 4 * found["peak_per_device"]


@pytest.mark.slow
def test_a_config_or_a_model_file_is_enough(tmp_path, stories_folder):
    """No weights, in the folder or beside the file that is named."""
    (tmp_path / "config.json").write_text(json.dumps(config_to_dict(CONFIG)))
    for path in (tmp_path, tmp_path / "config.json", stories_folder / "stories260K.bin"):
        done = run(path, "--batch", 1, "--length", 32, "--mode", "train", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["parameter_count"] == parameter_count(CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(ProgramCase("train step", "stories-15m", "data=1", 8, 256), marks=pytest.mark.nightly),
        ProgramCase("prefill", "stories-110m", "data=1", 1, 1024, dtype="bfloat16"),
        pytest.param(ProgramCase("train step", "stories-15m", "fsdp=2,tensor=2", 8, 256), marks=pytest.mark.nightly),
        pytest.param(ProgramCase("train step", "stories-42m", "data=1", 4, 256, remat="none"), marks=pytest.mark.nightly),
    ],
    ids=lambda case: f"{case.program} {case.mesh}",
)
def test_the_estimate_is_what_a_process_takes(case):
    assert estimate_ratio(case) == pytest.approx(1, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "count"),
    [pytest.param("llama-2-70b", 68_976_648_192, marks=pytest.mark.nightly), ("llama-3.1-405b", 405_853_388_800)],
)
def test_the_largest_models_on_512_devices(model, count):
    """Of no device is anything allocated: the shares of all add up to terabytes."""
    asked = [model, "--mode", "train", "--mesh", "fsdp=64,tensor=8", "--batch", 128, "--length", 2048, "--dtype", "bfloat16"]
    done = process(*asked, "--hardware", "h100", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["seconds"] < 300
    assert found["parameter_count"] == count
    step = found["bytes_per_device"]["train step"]
    assert step["parameters"] == step["gradients"] == pytest.approx(4 * count / 512, rel=0.01)
    assert step["optimizer"] == pytest.approx(2 * step["parameters"], rel=1e-3)
    assert found["fits"]
    gathered = [row for row in found["exchanged"]["train step"] if (row["opcode"], row["axes"]) == ("all-gather", ["fsdp"])]
    layers = sum(row["bytes"] * row["count"] for row in found["least_exchanged"] if row["what"].startswith("weights"))
    assert layers <= gathered[0]["bytes"] < 1.3 * layers
    assert (
        0.01 < found["rooflines"]["as compiled"]["mfu_apart"] < found["rooflines"]["as compiled"]["mfu_overlapped"] <= 0.75
    )


@pytest.mark.parametrize(
    ("arguments", "dtype", "words"),
    [
        ((), None, "q4_k and q6_k"),
        pytest.param(("--dtype", "float32"), "float32", "none", marks=pytest.mark.slow),
    ],
)
def test_a_file_is_planned_in_its_own_kinds(arguments, dtype, words):
    path = Path(__file__).parents[1] / "goldens" / "formats" / "q4_k_m.gguf"
    facts = json.loads(run(path, "--batch", 1, "--length", 32, "--json", *arguments).stdout)
    assert facts["quantize"] == words
    assert facts["bytes_per_device"]["decode"]["parameters"] == bytes_in_memory(load(path, dtype).params)
