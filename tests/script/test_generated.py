"""Generated scripts against real bash: equal or refused, never silently different."""

from __future__ import annotations

from collections import Counter

import pytest
from bench.scripts import differences

_PER_CASE = 50


@pytest.mark.parametrize("first", range(0, 500, _PER_CASE))
def test_never_silently_different(first: int) -> None:
    kinds: Counter[str] = Counter()
    for seed, kind, seconds, what in differences(range(first, first + _PER_CASE)):
        assert kind != "different", f"seed {seed}: {what}"
        assert seconds < 60
        kinds[kind] += 1
    assert kinds["equal"] + kinds["neither"] > _PER_CASE // 2
