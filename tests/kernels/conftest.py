"""What the tests of the C++ operators share."""

from collections.abc import Iterator

import pytest

from tests.kernels.instruction_sets import SETS, instruction_set


@pytest.fixture(params=SETS)
def every_set(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test once on every instruction set of this machine."""
    with instruction_set(request.param):
        yield request.param
