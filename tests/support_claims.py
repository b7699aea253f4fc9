"""The cells of the support matrix that tests claim by their marks, and a record of those that passed.

`@pytest.mark.supports("GGUF")` claims that a family has a feature of `experiments/support_matrix.py`, `refuses` that it is
an error. Braces stand for the test's parameters: `supports("{format}", family="{model}")`. By default the family is the
parameter `kind` and the platform "cpu", or that of the parameter `hardware`, whose compiler is asked. With
LLAMA_JAX_SUPPORT_RUN=FILE what the tests of a run claim, and how each ended, is added to the file, a line of JSON for each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable

import pytest
import support_matrix
from support_matrix import Cell

SKIPPED = ("nightly", "llama_cpp")  # are run by hand, and claim nothing
RUN = "LLAMA_JAX_SUPPORT_RUN"
COLLECTED = pytest.StashKey[tuple[set[str], set[Cell]]]()
"""The files that were collected as a whole, and the claims of their tests."""


def claims_of(item: pytest.Item) -> Iterable[Cell]:
    """Raises: ValueError: no such feature, family or platform."""
    if any(item.get_closest_marker(name) for name in SKIPPED):
        return
    given = getattr(getattr(item, "callspec", None), "params", {})
    test = item.nodeid.split("[")[0]
    for name in ("supports", "refuses"):
        for mark in item.iter_markers(name):
            families = mark.kwargs.get("family", "{kind}")
            hardware = str(given.get("hardware", ""))
            platform = mark.kwargs.get("platform", "cpu" if not hardware else "tpu" if "tpu" in hardware else "gpu")
            for family in [families] if isinstance(families, str) else families:
                for feature in mark.args:
                    cell = Cell(platform, feature.format(**given), family.format(**given).split(",")[0], test, name)
                    support_matrix.check(cell)
                    yield cell


class SupportClaims:
    """A plugin of pytest."""

    def __init__(self, config: pytest.Config) -> None:
        self.run = os.environ.get(RUN)
        # Each process of a run collects everything; the one that started them alone learns how all tests ended.
        self.worker = getattr(config, "workerinput", {}).get("workerid")

    def write(self, outcome: str, *entries: Iterable[str]) -> None:
        if self.run:
            with open(self.run, "a") as file:  # at once, for several processes write
                file.write("".join(json.dumps([outcome, *entry]) + "\n" for entry in entries))

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Before any are left out."""
        found: set[Cell] = set()
        for item in items:
            claims = list(claims_of(item))
            found.update(claims)
            if claims:
                item.user_properties.append(("support", [list(cell) for cell in claims]))  # as xdist can send them
        if not any("::" in argument for argument in config.args):  # whole files
            files = {item.nodeid.split("::")[0] for item in items}
            config.stash[COLLECTED] = files, found
            if self.worker in (None, "gw0"):
                self.write("collected", sorted(files))
                self.write("claimed", *sorted(found))

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Tests of another turn (tests/conftest.py) have no outcome in this run."""
        if os.environ.get("LLAMA_JAX_TURN") and self.worker in (None, "gw0"):
            for item in items:
                if item.get_closest_marker("rotating") or item.get_closest_marker("slow"):
                    self.write("rotated", *claims_of(item))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.worker is None and (report.when == "call" or not report.passed):
            for name, cells in report.user_properties:
                if name == "support":
                    self.write(report.outcome, *cells)
