"""Every causal model type of the installed transformers is served as transformers would, or refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from tests.engine.model_types import NOT_BUILT, kinds, listing, refusal

DOCS = Path(__file__).parents[2] / "docs" / "models.md"


def test_every_type_is_listed_once() -> None:
    text = DOCS.read_text()
    table = text[text.index("| | model types |") :].partition("\n\n")[0]
    every = {kind.model_type for kind in MODEL_FOR_CAUSAL_LM_MAPPING}
    assert {*NOT_BUILT} < every
    assert {name for name in every if table.count(f"`{name}`") == 1} == every


@pytest.mark.full
def test_the_documentation_says_what_is_served_and_what_is_refused() -> None:
    assert listing({name: refusal(kind) for name, kind in kinds().items()}) in DOCS.read_text(), (
        "tests/engine/model_types.py makes the table: python -m tests.engine.model_types"
    )
