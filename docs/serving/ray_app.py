"""Replicas of llama_jax under Ray Serve, each with an engine of its own; see ray.md: `serve run ray_app:app`."""

import os
from pathlib import Path

from ray import serve

from llama_jax.cli.serve import Serve
from llama_jax.serving.http.server import Mounted

DRAIN = 60.0  # seconds that running requests get to end when a replica is taken away


def server() -> Mounted:
    """Called in each replica; the options are those of `llama-jax serve`."""
    path = os.environ.get("MODEL")
    return Serve(
        model=None if path is None else Path(path),
        dtype=os.environ.get("DTYPE", "auto"),
        name="llama",
        allow_host=("*",),  # the proxy's name, which clients ask for, is not known here
        drain=DRAIN,
    ).application()


@serve.deployment(
    num_replicas=2,
    max_ongoing_requests=64,  # of a replica: its rows, and some that wait; more wait in the proxy
    max_queued_requests=256,  # there; more are answered with 503
    graceful_shutdown_timeout_s=DRAIN + 10,
    health_check_period_s=5,
    health_check_timeout_s=30,
    ray_actor_options={"num_cpus": 1},  # {"num_gpus": 1} gives each replica a GPU
)
@serve.ingress(server)
class Llama:
    def check_health(self) -> None:
        """Raise where `/health` would fail: Ray then starts another replica in the place of this one."""
        trouble = self.app.trouble()
        if trouble is not None:
            raise RuntimeError(trouble)


app = Llama.bind()
