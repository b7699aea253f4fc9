"""Being asked to stop."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType


class StopRequest:
    """Notes SIGTERM, SIGHUP and the first Ctrl-C, so that the step in progress can end and be saved.

    A second Ctrl-C leaves at once. A second SIGTERM does not: schedulers send it to a process and to its parent, which
    passes it on. `name` is the signal's name once one has come, else None. Outside the main thread, where no handler can be
    set, nothing is noted.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            hang_up = [signal.SIGHUP] if hasattr(signal, "SIGHUP") else []
            for number in (signal.SIGTERM, signal.SIGINT, *hang_up):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup stays
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.name is None:
            self.name = signal.Signals(number).name
            os.write(2, f"\n{self.name}: this step ends and is saved; Ctrl-C leaves at once\n".encode())
        elif number == signal.SIGINT:
            os.write(2, b"\nllama-jax: stopped without saving\n")
            os._exit(128 + number)
