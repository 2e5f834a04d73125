"""What all tests share."""

import os

from hypothesis import settings

from tests.databases import postgresql as postgresql
from tests.databases import postgresql_url as postgresql_url
from tests.databases import store_url as store_url

settings.register_profile("fixed", derandomize=True)
settings.register_profile("random", print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

os.environ.pop("RUBBERBAND_STORE", None)  # what tests run must not get among the journals of whoever runs them
