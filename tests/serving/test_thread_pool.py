"""Threads that nothing waits for, and their priority."""

import os
import sys
import threading

import pytest

from llama_jax.serving.thread_pool import LOW, DaemonThreadPool


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux alone")
def test_only_threads_that_are_to_wait_have_a_low_priority():
    """Not those of the start, whose priority XLA's own threads have."""

    def priority():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert DaemonThreadPool("as others", 1).submit(priority).result() == priority()
    assert DaemonThreadPool("low", 1, niceness=LOW).submit(priority).result() == min(priority() + LOW, 19)
