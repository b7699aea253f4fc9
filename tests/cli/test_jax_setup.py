"""What a command says of time."""

import threading

import jax
import pytest

from llama_jax.cli.jax_setup import CompileClock


def test_what_threads_compile_at_once_takes_its_time_once():
    clock = CompileClock()
    [event, *_] = [event for event in sorted(clock.EVENTS) if event.endswith("compile_duration")]
    record = lambda seconds: jax.monitoring.record_event_duration_secs(event, seconds)
    threads = [threading.Thread(target=record, args=(seconds,)) for seconds in (100.0, 60.0, 80.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.seconds == pytest.approx(100, abs=5)
