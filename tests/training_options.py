"""The nested options of training from flat keywords, for tests."""

from llama_jax.model.forward_options import ComputeOptions
from llama_jax.training.loss import LossOptions
from llama_jax.training.step import StepOptions


def loss_options(dtype=None, remat="none", chunk=None, z_loss=0.0, neftune=0.0, unroll=False, forward_mode=False):
    return LossOptions(ComputeOptions(dtype, remat, unroll=unroll, forward_mode=forward_mode), chunk, z_loss, neftune)


def step_options(accumulate=1, ema_decay=0.0, **loss):
    return StepOptions(loss_options(**loss), accumulate, ema_decay)
