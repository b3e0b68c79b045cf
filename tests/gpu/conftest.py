"""Everything in this folder needs a CUDA device: marked `gpu`, and skipped where there is none."""

import sys
from pathlib import Path

import pytest

from kda_engine.engines import cuda_usable

HERE = Path(__file__).parent

# Helpers that tests without a device use too.
sys.path.insert(0, str(HERE.parent))


def pytest_collection_modifyitems(items):
    here = [item for item in items if HERE in Path(item.path).parents]
    usable = bool(here) and cuda_usable()
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if not usable:
            item.add_marker(pytest.mark.skip(reason="no usable CUDA device"))
