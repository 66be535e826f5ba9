"""What the tests of the command line start from."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import FEW, houses, succeeded, trees, without_fsync, written


@pytest.fixture(autouse=True, scope="package")
def _no_fsync() -> Iterator[None]:
    with without_fsync():
        yield


@pytest.fixture(scope="session")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs on houses and trees, and both tables; not to be written to."""
    folder = tmp_path_factory.mktemp("fitted")
    for name, text, guide in (("houses", houses(), "dropout-ensemble"), ("trees", trees(), "mean-field")):
        succeeded("fit", written(folder, text, f"{name}.csv"), "--out", folder / name, "--guide", guide, *FEW)
    return folder
