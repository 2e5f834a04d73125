"""What all tests share."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

from tests.builders.databases import postgresql as postgresql
from tests.builders.databases import postgresql_url as postgresql_url
from tests.builders.databases import store_url as store_url

# How long an example takes, and how fast examples are made, is the machine's to say.
settings.register_profile("fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", settings.get_profile("fixed"))
settings.register_profile("random", settings.get_profile("fixed"), derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

os.environ.pop("RUBBERBAND_STORE", None)  # what tests run must not get among the journals of whoever runs them
# Workers of the tests share the cores: PyTorch's threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# The modules of all tests stay: walking through them again and again is a quarter of their collection.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but never look at what the modules hold."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix the files with real parts, which mostly wait, with those that compute: together they use the cores best."""
    files = list(dict.fromkeys(item.path for item in items))
    real = [path for path in files if "integration" in path.parts]
    rest = [path for path in files if "integration" not in path.parts]
    turns = {path: 0.7 * at / len(real) for at, path in enumerate(real)}  # none of them comes last, as some are long
    turns |= {path: at / len(rest) for at, path in enumerate(rest)}
    items.sort(key=lambda item: turns[item.path])
