"""Tests that packages which extend rubberband run on their own parts. It needs pytest."""

import pytest

pytest.register_assert_rewrite("rubberband.testing.provider_conformance")
