"""A few cases of the fuzzer at every run of the tests; `python tests/fuzz.py --seconds 3600` runs an hour."""

import pytest

from fuzz import run_case


@pytest.mark.parametrize(("kind", "count"), [("gradients", 40), ("calls", 40), ("files", 40), ("runs", 3)])
def test_random_attacks_find_nothing(kind: str, count: int) -> None:
    found = {number: finding for number in range(count) if (finding := run_case(kind, number)) is not None}
    assert not found
