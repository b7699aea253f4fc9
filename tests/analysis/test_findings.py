"""What is found in compiled programs, where the reading itself may be wrong."""

import pytest

from llama_jax.analysis.findings import _believed
from llama_jax.analysis.programs import Token


@pytest.mark.parametrize(("least", "believed"), [(100, True), (200, True), (201, False)])
def test_a_token_that_reads_less_than_it_must_is_another_loop(least, believed):
    token = Token(read=100, written=1, kernels=2, kernels_of_layers=2, collectives=0)
    assert _believed(token, least) == (token if believed else None)
