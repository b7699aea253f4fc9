"""NEFTune: noise on embeddings in training, uniform within alpha / sqrt(L D) of each document."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import jit_init, tiny_config
from training_options import loss_options

import llama_jax
from llama_jax.data import ChatReading
from llama_jax.errors import ConfigError, TrainingError
from llama_jax.model.forward import forward
from llama_jax.model.forward_options import Positions
from llama_jax.parallel.mesh import MeshSizes, make_mesh
from llama_jax.parallel.sharding import batch_spec, param_specs, shardings, training_sharding
from llama_jax.runs.preflight import check_task
from llama_jax.runs.recipe import Recipe
from llama_jax.runs.tasks.language_modeling import noise_bits
from llama_jax.training.batch import Batch, to_next_token_batch
from llama_jax.training.loss import total_loss
from llama_jax.training.neftune import with_noise
from llama_jax.training.preference_loss import PreferenceOptions

CONFIG = tiny_config(dim=64, n_layers=1, n_kv_heads=4, hidden_dim=64, max_seq_len=128, tie_embeddings=True)
ROWS, LENGTH, ALPHA = 4, 96, 5.0
SEGMENTS = np.tile(np.repeat([1, 2, 0], [16, 65, 16]), (ROWS, 1)).astype(np.int32)  # 16 and 65 tokens, and padding
POSITIONS = np.concatenate([np.arange(16), np.arange(65), np.arange(16)]).astype(np.int32)
BATCH = Batch(
    np.random.default_rng(0).integers(0, 64, (ROWS, LENGTH + 1), np.int32),
    SEGMENTS,
    np.tile(POSITIONS, (ROWS, 1)),
    noise=noise_bits(0, 3, (0, ROWS, ROWS), LENGTH),
)


@pytest.fixture(scope="module")
def params():
    return jit_init(CONFIG, jax.random.key(0))


@partial(jax.jit, static_argnums=2)
def noise_in_embedding(params, batch, alpha):
    rows = to_next_token_batch(batch)
    return with_noise(params, rows, alpha).embedding.embed(rows.tokens) - params.embedding[rows.tokens]


def noise(params, batch, alpha=ALPHA):
    return np.asarray(noise_in_embedding(params, batch, alpha))


def test_its_law(params):
    """Uniform, of mean 0, within what the length of its own document says."""
    found = noise(params, BATCH)
    for tokens, length in ((slice(0, 16), 16), (slice(16, 81), 65)):
        within, some = ALPHA / np.sqrt(length * CONFIG.dim), found[:, tokens]
        assert 0.99 * within < np.abs(some).max() <= within * (1 + 1e-5)
        assert abs(some.mean()) < 5 * within / np.sqrt(3 * some.size)
        np.testing.assert_allclose(some.std(), within / np.sqrt(3), rtol=0.03)
        quarters = np.histogram(some, bins=4, range=(-within, within))[0] / some.size
        np.testing.assert_allclose(quarters, 0.25, atol=0.02)
    tokens = found[:, :80].reshape(-1, CONFIG.dim)
    assert len({token.tobytes() for token in tokens}) == len(tokens)  # of each token its own
    together = np.corrcoef(tokens[:40])
    assert np.abs(together - np.eye(40)).max() < 0.6
    np.testing.assert_allclose(noise(params, BATCH, 2 * ALPHA), 2 * found, rtol=1e-5, atol=1e-6)


def test_it_is_made_of_seed_and_number_alone():
    whole = noise_bits(7, 11, (0, 8, 8), 20)
    halves = [noise_bits(7, 11, (first, 4, 8), 20) for first in (0, 4)]
    np.testing.assert_array_equal(np.concatenate(halves), whole)
    assert whole.dtype == np.uint32
    assert not np.array_equal(whole, noise_bits(7, 12, (0, 8, 8), 20))
    assert not np.array_equal(whole, noise_bits(8, 11, (0, 8, 8), 20))
    assert whole[0, :3].tolist() == noise_bits(7, 11, (0, 1, 8), 20)[0, :3].tolist()


def test_the_loss_reads_the_noise_and_predicts_without(params):
    """The tied output projection is the embedding as it is; the padding's noise reaches nobody."""
    options = loss_options(chunk=8, neftune=ALPHA)
    found = jax.jit(partial(total_loss, CONFIG, options=options))(params, BATCH)
    rows = to_next_token_batch(BATCH)

    @jax.jit
    def definition(params):
        positions = Positions(position_ids=rows.position_ids, segment_ids=rows.segment_ids)
        hidden, _ = forward(CONFIG, with_noise(params, rows, ALPHA), rows.tokens, positions=positions)
        logprobs = jax.nn.log_softmax(hidden.astype(jnp.float32) @ params.embedding.T)
        chosen = jnp.take_along_axis(logprobs, rows.targets[..., None], axis=-1)[..., 0]
        return -jnp.sum(jnp.where(rows.target_mask, chosen, 0))

    np.testing.assert_allclose(found.nll, definition(params), rtol=1e-5)
    without = jax.jit(partial(total_loss, CONFIG, options=loss_options(chunk=8)))(params, BATCH)
    assert abs(float(found.nll - without.nll)) > 1e-2


def test_what_cannot_be(params):
    with pytest.raises(ConfigError, match=r"neftune=5.0 needs random numbers; set the batch's noise"):
        total_loss(CONFIG, params, Batch(BATCH.tokens), loss_options(neftune=5.0))
    with pytest.raises(ConfigError, match=r"neftune=-1.0 must be at least 0"):
        loss_options(neftune=-1.0)


def test_it_is_refused_where_it_would_be_ignored():
    rows = {"model": CONFIG, "steps": 2, "batch": 2, "length": 16, "chats": ChatReading(), "neftune": 5.0}
    check_task(Recipe(**rows), MeshSizes(), "jit")
    with pytest.raises(TrainingError, match=r"neftune=5.0 is a part of the default loss, which preference replaces"):
        check_task(Recipe(**rows, preference=PreferenceOptions()), MeshSizes(), "jit")


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [MeshSizes(fsdp=2, tensor=2), MeshSizes(context=2, fsdp=2)], ids=str)
def test_over_a_mesh_it_is_the_same(params, sizes):
    options, mesh = loss_options(chunk=8, neftune=ALPHA), make_mesh(sizes)
    differentiate = lambda config, params, batch, sharding: jax.value_and_grad(
        lambda params: total_loss(config, sharding.prepare_params(params), batch, options, sharding).loss
    )(params)
    wanted = jax.jit(partial(differentiate, CONFIG), static_argnums=2)(params, BATCH, llama_jax.Sharding())
    held, sharding = training_sharding(CONFIG, mesh)
    placed = jax.device_put(params, shardings(mesh, param_specs(CONFIG, sizes)))
    batch = jax.device_put(BATCH, shardings(mesh, batch_spec(sizes, ROWS)))
    found = jax.jit(lambda params, batch: differentiate(held, params, batch, sharding))(placed, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, wanted)
