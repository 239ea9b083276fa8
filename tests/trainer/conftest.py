from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.gloo_ranks import Gang


@pytest.fixture(scope="module")
def gang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gang]:
    made = Gang(tmp_path_factory.mktemp("gang"))
    yield made
    made.end()
