"""The page of models, caches and methods: every cell is run anew and must say the same."""

from __future__ import annotations

import pytest

from tests.models.compatibility import PAGE, cells, page, refusal
from tests.models.tiny import FAMILIES, REFUSED

measured: dict[str, dict[str, dict[str, str]]] = {}
# A second prompt's cache is joined to the first's, which only a DynamicCache can be.
NOT_FOR_CFG = ("static", "quantised")


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_method_works_with_every_cache(family):
    measured[family] = cells(family)
    for method, caches in measured[family].items():
        for cache, text in caches.items():
            if method == "CFG" and cache in NOT_FOR_CFG:
                assert "a second prompt needs a DynamicCache" in text
            else:
                assert text == "works", (method, cache)


@pytest.mark.parametrize("family", list(REFUSED))
def test_models_that_cannot_be_hooked_are_refused_before_anything_runs(family):
    assert REFUSED[family][1] in refusal(family)


def test_the_page_says_so():
    table = {family: measured.get(family) or cells(family) for family in FAMILIES}
    assert PAGE.read_text() == page(table, [refusal(family) for family in REFUSED])
