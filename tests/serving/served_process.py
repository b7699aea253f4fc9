"""A server of a fake engine as a process: `python served_process.py '{"fail_at": 3, "drain": 5}'`.

Its address goes to stdout when it is ready, and in the end how many objects garbage collection leaves out. With `starts` not
"at once" the address goes there before as well, and it is ready, or fails, when a line has come on stdin. What it says of a
prompt that begins with "wait" ends only when a line has come; one that begins with "stuck" keeps the engine for ever.
"""

import gc
import json
import socket
import sys
import threading

from fakes import BYTES, FakeEngine, ids, served

from llama_jax.serving.http.server import Started, Startup, address_of, listen, serve
from llama_jax.serving.http.service import ServerOptions


def says(request):
    yield from ids("begun")
    text = BYTES.decode(request.prompt)
    if text.startswith("wait"):
        sys.stdin.readline()
    if text.startswith("stuck"):
        threading.Event().wait()
    while text.startswith("for ever"):
        yield ids("x")[0]
    yield BYTES.eos_id


def main(drain=20.0, buffer=None, starts="at once", **settings):
    engine = FakeEngine(says=says, context=10**9, **settings)
    listening = listen("127.0.0.1", 0)
    if buffer:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)  # connections have it, too
    startup = Startup()
    say = lambda: print(address_of(listening), flush=True)

    def start():
        if starts == "at once":
            return Started(engine, served())
        startup.report("compiling programs", 3, 7)
        say()
        sys.stdin.readline()
        if starts == "never":
            raise RuntimeError("there is no model")
        return Started(engine, served())

    serve(start, startup, ServerOptions(drain_seconds=drain), listening, say)
    print("ended", gc.get_freeze_count(), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
