from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import pytest
from conftest import jit_init

from llama_jax import cache_bytes, parameter_count, preset
from llama_jax.analysis.memory import decode_programs, kernel_scratch, train_programs
from llama_jax.errors import MeshError
from llama_jax.model.trees import bytes_in_memory, quantize
from llama_jax.ops.weights.formats import ENCODABLE
from llama_jax.parallel.mesh import make_mesh, parse_mesh

CONFIG = preset("stories-260k")
WEIGHTS = 4 * parameter_count(CONFIG)
NORMS = 4 * (2 * CONFIG.n_layers + 1) * CONFIG.dim  # on every device


@pytest.fixture(scope="module")
def train():
    """{mesh: memory of a train step}"""
    return {mesh: train_programs(CONFIG, make_mesh(parse_mesh(mesh)), 8, 64)[0].memory() for mesh in ("data=1", "fsdp=4")}


@pytest.fixture(scope="module")
def decoding():
    """{mesh: {program: memory}}"""
    return {
        mesh: {p.name: p.memory() for p in decode_programs(CONFIG, make_mesh(parse_mesh(mesh)), 4, 256)}
        for mesh in ("data=1", "fsdp=2,tensor=2")
    }


def test_a_train_step_by_its_parts(train):
    memory = train["data=1"]
    assert memory.parameters == memory.gradients == WEIGHTS
    assert memory.optimizer == 2 * WEIGHTS + 4  # the counter of steps
    assert memory.cache == 0
    # Between layers the residual stream is kept, for the backward pass: B T D of float32 for each.
    assert memory.temporaries > CONFIG.n_layers * 8 * 64 * CONFIG.dim * 4


def test_a_device_has_its_share(train):
    share = (WEIGHTS - NORMS) // 4 + NORMS
    memory = train["fsdp=4"]
    assert memory.parameters == memory.gradients == share
    assert memory.optimizer == 2 * share + 4
    assert memory.total < train["data=1"].total / 2


@pytest.mark.slow
def test_the_total_is_the_plan_of_xla_and_scratch():
    (program,) = train_programs(CONFIG, make_mesh(parse_mesh("tensor=2")), 2, 32)
    compiled = program.function.lower(*program.arguments).compile()
    plan = compiled.memory_analysis()
    alive = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes + plan.temp_size_in_bytes
    memory = program.memory()
    assert memory.total == alive + kernel_scratch(compiled.as_text())
    assert plan.alias_size_in_bytes >= memory.parameters + memory.optimizer  # updated in place
    assert all(size >= 0 for size in asdict(memory).values())


@pytest.mark.slow
def test_for_an_accelerator_16_bit_numbers_stay_so():
    (program,) = train_programs(CONFIG, make_mesh(parse_mesh("data=1")), 8, 128, dtype="bfloat16")
    here, there = (program.compile(accelerator=accelerator) for accelerator in (False, True))
    assert there.as_text().count("= bf16[") > here.as_text().count("= bf16[")
    widened, narrow = program.memory(here), program.memory(there, accelerator=True)
    assert narrow.total < widened.total
    assert narrow.scratch == 0
    assert (narrow.parameters, narrow.optimizer) == (widened.parameters, widened.optimizer)


@pytest.mark.slow
def test_generating_by_its_parts(decoding):
    for mesh, parts in (("data=1", 1), ("fsdp=2,tensor=2", 4)):
        found = decoding[mesh]
        cache = cache_bytes(CONFIG, 4, 256, jnp.float32) // parts
        for memory in found.values():
            assert memory.parameters == (WEIGHTS - NORMS) // parts + NORMS
            assert memory.gradients == memory.optimizer == 0
            assert memory.total >= memory.parameters + memory.cache
        assert found["prefill"].cache == found["decode"].cache == pytest.approx(cache, abs=300)  # and the tables
        # All scores of 256 tokens against 256 slots, in every head, of which attention over pages makes some at once.
        scores = 4 * CONFIG.n_heads * 256 * 256 * 4 // parts
        assert scores > found["prefill"].temporaries > found["decode"].temporaries >= 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENCODABLE)
def test_quantized_weights_count_as_they_lie_in_memory(kind):
    """Planes of every kind, on one device and on two that divide rows; what is planned for is what `quantize` makes."""
    config = replace(
        CONFIG, dim=256, n_heads=2, n_kv_heads=2, head_dim=128, hidden_dim=512, n_layers=2, tie_embeddings=False
    )
    params = quantize(jit_init(config, jax.random.key(0), jnp.bfloat16), kind)
    held, lengths = bytes_in_memory(params), 100
    prefill, decode = decode_programs(config, make_mesh(parse_mesh("data=1")), 2, 128, dtype="bfloat16", weights=kind)
    assert {program.known.parameters for program in (prefill, decode)} == {held}
    cache = cache_bytes(config, 2, 128, jnp.bfloat16)
    assert decode.known.cache == pytest.approx(cache, abs=lengths)
    # A token reads all but the table in which it is looked up.
    assert decode.per_token == pytest.approx(held - bytes_in_memory(params.embedding) + cache, abs=lengths)
    memory = decode.memory()
    assert (memory.parameters, memory.cache) == (held, decode.known.cache)
    # What XLA for CPU makes of 16-bit numbers, float32 copies; of fp8 its chunks besides.
    assert 0 < memory.temporaries < 5 * parameter_count(config)
    half = decode_programs(config, make_mesh(parse_mesh("tensor=2")), 2, 128, dtype="bfloat16", weights=kind)[-1]
    norms = 2 * (2 * config.n_layers + 1) * config.dim
    # Factors for whole rows are on every device where a matrix is cut along its rows' numbers; `out`, of which a device has
    # 128 columns, is in blocks of 32 instead of 256, of more bits.
    assert (held - norms) / 2 + norms <= half.known.parameters <= 1.03 * held / 2 + norms


def test_weights_that_a_program_does_not_read_are_alive_all_the_same():
    """Reading a prompt ends before the output projection, which jit leaves out of the program's arguments."""
    untied = replace(CONFIG, tie_embeddings=False)
    prefill, *_ = decode_programs(untied, make_mesh(parse_mesh("data=1")), 4, 256)
    memory = prefill.memory()
    assert memory.parameters == 4 * parameter_count(untied)


@pytest.mark.slow
def test_heads_that_a_mesh_copies_and_a_padded_vocabulary_count():
    few = replace(CONFIG, n_kv_heads=2, vocab_size=500, tie_embeddings=False)  # held as 4 heads, and 512 tokens
    decode = decode_programs(few, make_mesh(parse_mesh("tensor=4")), 4, 256)[-1]
    assert decode.known.cache == pytest.approx(cache_bytes(few, 4, 256, jnp.float32) // 2, abs=300)
    full = replace(few, n_kv_heads=4, vocab_size=512)
    assert decode.known.parameters < 4 * parameter_count(full) / 4 + NORMS
    assert decode.known.parameters > 4 * parameter_count(few) / 4
    assert decode.memory().total > decode.known.total


def test_what_does_not_divide_is_refused_before_compiling():
    mesh = make_mesh(parse_mesh("fsdp=2,tensor=4"))
    with pytest.raises(MeshError, match=r"batch=3 cannot be split over data\*fsdp=2"):
        train_programs(CONFIG, mesh, 3, 16)
    with pytest.raises(MeshError, match=r"n_kv_heads=6 .*cannot be split over tensor=4"):
        decode_programs(preset("stories-15m"), mesh, 2, 256)


# The softmax of an attention and its product with the values, as XLA for CPU writes them down.
GROUP = """
%fused_computation.4 (param_0.1: f32[4,96,96], param_1.2: f32[4,96,16]) -> f32[4,1,96,16] {
  %param_0.1 = f32[4,96,96]{2,1,0} parameter(0)
  %param_1.2 = f32[4,96,16]{2,1,0} parameter(1)
  %reduce.1 = f32[4,96]{1,0} reduce(%param_0.1, %constant.1), dimensions={2}, to_apply=%region_0
  %exponential.1 = f32[4,96,96]{2,1,0} exponential(%param_0.1)
  %dot.1 = f32[4,96,16]{2,1,0} dot(%exponential.1, %param_1.2), lhs_batch_dims={0}, rhs_batch_dims={0}
  ROOT %bitcast.1 = f32[4,1,96,16]{3,2,1,0} bitcast(%dot.1)
}

%fused_computation.5 (param_0.3: bf16[512,512]) -> bf16[512,512] {
  %param_0.3 = bf16[512,512]{1,0} parameter(0)
  %negate.1 = bf16[512,512]{1,0} negate(%param_0.3)
  ROOT %exponential.2 = bf16[512,512]{1,0} exponential(%negate.1)
}

ENTRY %main (x: f32[4,96,96], y: f32[4,96,16]) -> f32[4,1,96,16] {
  %fusion.5 = bf16[512,512]{1,0} fusion(%z), kind=kLoop, calls=%fused_computation.5
  %ynn_fusion = f32[4,1,96,16]{3,2,1,0} fusion(%x, %y), kind=kCustom, calls=%fused_computation.4, backend_config=CONFIG
}
"""


def test_scratch_is_what_lies_inside_a_group_that_a_kernel_library_runs():
    handed_over = GROUP.replace("CONFIG", '{"fusion_config":{"kind":"__ynn_fusion"}}')
    assert kernel_scratch(handed_over) == 4 * 96 * 96 * 4
    assert kernel_scratch(GROUP) == 0
    # The product's own result is the group's, under another shape.
    alone = handed_over.replace("exponential(%param_0.1)", "parameter(2)")
    assert kernel_scratch(alone) == 4 * 96 * 4


def test_scratch_of_a_sum_alone():
    """Of the loss: the exponentials of a chunk of logits, which are nowhere in XLA's plan."""
    (train,) = train_programs(preset("stories-15m"), make_mesh(parse_mesh("data=1")), 2, 64)
    memory = train.memory()
    assert memory.scratch == 2 * 64 * 32000 * 4
