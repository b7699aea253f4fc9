"""The support matrix: that the committed page says what the tests claim."""

from pathlib import Path

import pytest
import support_claims
from support_claims import COLLECTED

from llama_jax.config.families import FAMILIES

ROOT = Path(__file__).parents[1]


def test_every_family_has_a_row():
    assert set(support_claims.FAMILIES) == set(FAMILIES)


def test_the_committed_matrix_is_what_the_tests_claim(request):
    """For the test files that this run collected."""
    committed = support_claims.read_cells()
    assert all((ROOT / cell.test.split("::")[0]).exists() for cell in committed)
    if COLLECTED not in request.config.stash:
        pytest.skip("a part of a file was collected")
    files, claims = request.config.stash[COLLECTED]
    recorded = {cell for cell in committed if cell.test.split("::")[0] in files}
    assert recorded == claims, "marks and matrix differ: run tests/support_claims.py, see docs/extending.md"


def test_the_committed_page_is_of_the_committed_matrix():
    assert support_claims.PAGE.read_text("utf-8") == support_claims.render(support_claims.read_cells())
