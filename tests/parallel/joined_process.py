"""One of several processes of a job: `python joined_process.py COORDINATOR COUNT INDEX END`."""

import json
import sys
import threading

from llama_jax.errors import DataError
from llama_jax.parallel import multihost

MESSAGES = 2 * multihost.MESSAGES_STORED + 1


def main(coordinator, count, index, end):
    with multihost.join_job(coordinator, int(count), int(index)) as joined:
        thread = threading.Thread(target=joined.barrier, args=("in a thread",))
        thread.start()
        joined.assert_equal("values", {"mesh": "data=2", "steps": (1, 2)})
        gathered = [joined.gather("files", {"of": (joined.index, number)}) for number in range(2)]
        thread.join()
        contents = [bytes([number % 256]) * (number % 3) for number in range(MESSAGES)]
        if joined.index == 0:
            for content in contents:
                joined.broadcast(content)
        else:
            assert [joined.receive() for _ in contents] == contents
        print(json.dumps({"gathered": gathered, "host": joined.host, "on_one_host": joined.on_one_host}), flush=True)
        if end == "a value differs":
            joined.assert_equal("values", {"recipe steps": 5 + (joined.index == 2)})
        if end == "a process fails" and joined.index == 1:
            raise DataError("disk\nfull")
        if end == "process 0 has a bug" and joined.index == 0:
            multihost.HEARTBEAT_TIMEOUT = 0
            raise KeyError("loss")
        if end:
            joined.barrier("never passed")


if __name__ == "__main__":
    main(*sys.argv[1:])
