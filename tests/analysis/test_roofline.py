"""Bounds by published figures, and the least that strategies exchange, by numbers that can be worked out by hand."""

import math
from dataclasses import replace

import pytest

from llama_jax import parameter_count, preset
from llama_jax.analysis.collectives import Collective, find_collectives
from llama_jax.analysis.hardware import Hardware, hardware_by_name
from llama_jax.analysis.memory import train_programs
from llama_jax.analysis.roofline import (
    OPTIMIZER_TRAFFIC,
    DeviceExchange,
    decoding_roofline,
    exchange_seconds,
    least_traffic,
    training_roofline,
)
from llama_jax.errors import MeshError
from llama_jax.inference.decode import STEPS_PER_CHUNK
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.training.flops import flops_utilization, matrix_parameters, step_flops

SMALL = replace(preset("stories-260k"), tie_embeddings=False)
LARGE = preset("llama-3.1-405b")
# Round figures: 2 devices to a domain, 100 bytes/s inside and 10 beyond.
TOY = Hardware("toy", flops=1e3, memory=1000, memory_bandwidth=1e3, link_bandwidth=100, domain=2, network_bandwidth=10)


def sent(found, axis):
    return sum(one.count * one.sent for one in found if one.axes == (axis,))


def matrices(config):
    """Parameters without normalizations."""
    return matrix_parameters(config) + (0 if config.tie_embeddings else config.vocab_size * config.dim)


def test_data_parallelism_sums_all_gradients_once():
    (found,) = least_traffic(LARGE, MeshSizes(data=8), 8, 1024, "bfloat16")
    assert (found.opcode, found.count) == ("all-reduce", 1)
    assert found.bytes == 4 * matrices(LARGE)
    assert found.bytes == pytest.approx(4 * parameter_count(LARGE), rel=1e-4)
    assert found.sent == 2 * 7 / 8 * found.bytes


def test_all_experts_are_held_and_sent_whichever_a_token_is_given_to():
    config = preset("mixtral-8x7b")
    (found,) = least_traffic(config, MeshSizes(data=8), 8, 1024, "bfloat16")
    assert found.bytes == pytest.approx(4 * parameter_count(config), rel=1e-4)
    gathered = [one for one in least_traffic(config, MeshSizes(fsdp=8), 8, 1024, "bfloat16") if one.opcode == "all-gather"]
    held = parameter_count(config) - config.vocab_size * config.dim  # the embedding is looked up in parts
    assert sum(one.count * one.bytes for one in gathered) == pytest.approx(2 * 2 * held, rel=0.01)
    h200 = hardware_by_name("h200")
    step = training_roofline(config, MeshSizes(), 1, 1, "bfloat16", "none", h200, [])
    read = (3 * 2 * held + OPTIMIZER_TRAFFIC * parameter_count(config)) / h200.memory_bandwidth
    assert step.memory == pytest.approx(read, rel=0.01)


def test_fsdp_sends_half_more_than_data_parallelism():
    """Rajbhandari et al. 2020, section 7.2.2, where all travels in the same type."""
    config = replace(LARGE, vocab_size=8)
    data = least_traffic(config, MeshSizes(data=64), 64, 8192, "float32")
    fsdp = least_traffic(config, MeshSizes(fsdp=64), 64, 8192, "float32")
    assert sent(fsdp, "fsdp") == pytest.approx(1.5 * sent(data, "data"), rel=1e-3)
    gathered = sum(one.count * one.bytes for one in fsdp if one.opcode == "all-gather")
    assert gathered == pytest.approx(2 * 4 * parameter_count(config), rel=1e-3)


@pytest.mark.parametrize(("remat", "sums"), [("full", 5), ("dots", 4), ("none", 4)])
def test_tensor_parallelism_sums_the_stream_twice_in_each_layer_and_direction(remat, sums):
    stream = 4 * 1024 * SMALL.dim * 4
    whole = least_traffic(SMALL, MeshSizes(tensor=4), 4, 1023, "float32", remat)
    assert {one.opcode for one in whole} == {"all-reduce"}
    assert sum(one.count for one in whole) == sums * SMALL.n_layers + 2
    split = least_traffic(SMALL, MeshSizes(tensor=4), 4, 1024, "float32", remat)
    assert {one.opcode for one in split} == {"all-gather", "reduce-scatter"}
    # Split along T it sends as much, but where the input of what is computed again is gathered for it.
    extra = {"full": 1, "dots": 2, "none": 0}[remat] * SMALL.n_layers * 3 / 4 * stream
    assert sent(split, "tensor") == pytest.approx(sent(whole, "tensor") * 1024 / 1023 + extra)


def test_context_shares_what_fsdp_does_and_sends_keys_and_values_around():
    both = least_traffic(SMALL, MeshSizes(fsdp=2, context=4), 8, 64, "bfloat16")
    alone = least_traffic(SMALL, MeshSizes(fsdp=8), 8, 64, "bfloat16")
    assert [(one.opcode, one.sent) for one in both if one.opcode != "collective-permute"] == [
        (one.opcode, one.sent) for one in alone
    ]
    assert {one.axes for one in both if one.opcode != "collective-permute"} == {("fsdp", "context")}
    ring = [one for one in both if one.opcode == "collective-permute"]
    keys = 8 / 2 * 64 / 4 * SMALL.n_kv_heads * SMALL.head_dim
    assert {(one.axes, one.bytes) for one in ring} == {(("context",), 2 * keys), (("context",), 4 * keys)}
    assert [one.count for one in ring] == [2 * n * SMALL.n_layers for n in (3, 3, 3, 4)]
    kept = least_traffic(SMALL, MeshSizes(context=4), 8, 64, "bfloat16", "none")
    assert sum(one.opcode == "collective-permute" for one in kept) == 3  # nothing is sent again
    few = least_traffic(SMALL, MeshSizes(tensor=2 * SMALL.n_kv_heads, context=2), 8, 64, "bfloat16")
    one_head = 8 * 64 / 2 * SMALL.head_dim
    assert {one.bytes for one in few if one.opcode == "collective-permute"} == {2 * one_head, 4 * one_head}


def test_a_tied_embedding_is_gathered_once_as_the_output_projection():
    found = least_traffic(replace(SMALL, tie_embeddings=True), MeshSizes(fsdp=8), 8, 64, "float32")
    vectors = SMALL.vocab_size * SMALL.dim * 4
    assert [one.bytes for one in found if one.count == 1 and one.opcode == "all-gather"] == [vectors]


def test_a_small_batch_is_cheaper_to_send_than_the_embedding():
    def kinds(batch):
        return {one.opcode for one in least_traffic(LARGE, MeshSizes(fsdp=8), batch, 1024, "bfloat16")}

    assert "all-to-all" in kinds(8)
    assert "all-to-all" not in kinds(80_000)


@pytest.mark.slow
def test_the_compiled_step_gathers_its_weights_as_rarely_as_the_least():
    sizes = MeshSizes(fsdp=4)
    mesh = make_mesh(sizes)
    (program,) = train_programs(SMALL, mesh, 8, 64, dtype="bfloat16")
    found = find_collectives(program.compile(accelerator=True).as_text(), mesh)
    layers = [one for one in found if one.opcode == "all-gather" and one.loops == (SMALL.n_layers,)]
    least = [one for one in least_traffic(SMALL, sizes, 8, 64, "bfloat16") if one.what.startswith("weights")]
    assert {one.dtypes for one in layers} == {("bf16",)}  # XLA for CPU by itself would widen them
    assert sum(one.count * one.bytes for one in layers) == sum(one.count * one.bytes for one in least)


def exchange(kind, size, axes=("tensor",), group=2, count=1):
    return DeviceExchange("test", kind, axes, group, size, count)


def test_within_a_domain_the_links_count():
    assert exchange_seconds([exchange("all-gather", 400, count=3)], MeshSizes(tensor=2), TOY) == 3 * 200 / 100
    assert exchange_seconds([], MeshSizes(tensor=2), TOY) == 0


def test_across_domains_every_device_takes_its_share_of_the_network():
    sizes = MeshSizes(fsdp=4, tensor=2)
    alone = exchange("all-gather", 400, ("fsdp",), 4)  # each of the four in a domain of its own
    assert exchange_seconds([alone], sizes, TOY) == 300 / 10
    both = exchange("all-gather", 400, ("fsdp", "tensor"), 8)  # two in each of four domains
    assert exchange_seconds([both], sizes, TOY) == 300 / 2 / 10
    for kind, seconds in (("all-reduce", 300 / 10), ("all-to-all", 400 * 6 / 8 / 10), ("collective-permute", 40)):
        assert exchange_seconds([replace(both, opcode=kind)], sizes, TOY) == pytest.approx(seconds)
    # A reduce-scatter's result is a part: 50 of 400.
    assert exchange_seconds([replace(both, opcode="reduce-scatter", bytes=50)], sizes, TOY) == pytest.approx(300 / 2 / 10)


def test_where_no_network_is_published_a_mesh_may_not_leave_the_links():
    pair = hardware_by_name("h100-pcie")
    assert exchange_seconds([exchange("all-gather", 400)], MeshSizes(tensor=2), pair) > 0
    with pytest.raises(MeshError, match=r"tensor leaves the 2 devices that the links of H100 PCIe connect"):
        exchange_seconds([exchange("all-gather", 400, group=4)], MeshSizes(tensor=4), pair)


def test_a_sum_that_is_sliced_costs_as_a_scatter():
    whole = Collective("all-reduce", ("tensor",), 2, 400, 0, ("f32[100]",))
    assert exchange_seconds([whole], MeshSizes(tensor=2), TOY) == 400 / 100
    assert exchange_seconds([replace(whole, sliced=400)], MeshSizes(tensor=2), TOY) == 200 / 100


def test_training_of_405_billion_on_512_h200():
    sizes, h200 = MeshSizes(fsdp=64, tensor=8), hardware_by_name("h200")
    least = least_traffic(LARGE, sizes, 512, 8192, "bfloat16")
    bound = training_roofline(LARGE, sizes, 512, 8192, "bfloat16", "full", h200, least)
    flops = step_flops(LARGE, 512, 8192)
    assert bound.useful == pytest.approx(flops / 512 / 989.5e12)
    assert bound.compute == pytest.approx(4 / 3 * bound.useful)  # the forward pass twice
    assert bound.utilization(10.0) == pytest.approx(flops_utilization(flops, 10.0, 512, h200.flops))
    assert bound.limit == "compute"
    assert 0.05 * bound.compute < bound.exchange < bound.compute
    without = training_roofline(LARGE, sizes, 512, 8192, "bfloat16", "none", h200, least)
    assert without.compute == without.useful
    # Gathering 810 GB of weights twice over a network is worth it only for many tokens.
    few = least_traffic(LARGE, sizes, 64, 512, "bfloat16")
    assert training_roofline(LARGE, sizes, 64, 512, "bfloat16", "full", h200, few).limit == "exchange"


def test_decoding_is_bound_by_reading_the_weights():
    sizes, config = MeshSizes(tensor=8), preset("llama-3.1-70b")
    resident = 2 * parameter_count(config) // 8
    once = Collective("all-reduce", ("tensor",), 8, 10**9, 0, ("bf16[1]",), loops=(3,))
    bound = decoding_roofline(config, sizes, 1, 4096, hardware_by_name("h200"), resident, [once])
    assert bound.limit == "memory"
    assert bound.exchange == pytest.approx(
        3 * 2 * 7 / 8 * 1e9 / 450e9 / STEPS_PER_CHUNK
    )  # once in a call, which is for a chunk
    assert 1 / bound.overlapped == pytest.approx(8 * 4.8e12 / (2 * parameter_count(config)), rel=1e-6)
    turn = replace(once, loops=(None, 3))
    again = decoding_roofline(config, sizes, 1, 4096, hardware_by_name("h200"), resident, [once, turn])
    assert again.exchange == pytest.approx(2 * bound.exchange)
    assert math.isclose(again.apart, again.compute + again.memory + again.exchange)


def test_decoding_multiplies_only_what_windows_and_chunks_keep():
    h200 = hardware_by_name("h200")

    def scores(config, slots):
        flops = decoding_roofline(config, MeshSizes(), 2, slots, h200, 0, []).compute * h200.flops / 2
        return (flops - 2 * matrix_parameters(config)) / (4 * config.head_dim * config.n_heads)

    gemma, scout = preset("gemma-3-1b"), preset("llama-4-scout")
    assert scores(gemma, 30_000) == pytest.approx(22 * 512 + 4 * 30_000)
    assert scores(gemma, 100) == pytest.approx(26 * 100, rel=1e-4)
    # The first token of a chunk attends to itself alone, but in every fourth layer to all.
    assert scores(scout, 2 * 8192 + 1) == pytest.approx(36 * 1 + 12 * (2 * 8192 + 1), rel=1e-4)
