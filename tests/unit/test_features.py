"""The table of features, and the page on how it all works: what they name is there."""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
import re
from pathlib import Path

import pytest

import rubberband
from rubberband.errors import InputError
from rubberband.features import FEATURES, Feature, feature_of, require_features
from rubberband.spec.loading import experiment_schema

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "how-it-works.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_feature_names_what_is_there(feature: Feature) -> None:
    places = [Path(rubberband.__file__).parent.joinpath(*module.split(".")) for module in feature.modules]
    assert [place for place in places if not place.is_dir() and not place.with_suffix(".py").is_file()] == []
    for joined in feature.joins.values():
        assert pkgutil.resolve_name(f"rubberband.{joined}") is not None
        assert feature_of(f"rubberband.{joined.partition(':')[0]}") is feature
    keys = {word.partition(".")[0] for word in feature.words}
    assert keys <= json.loads(experiment_schema())["properties"].keys()
    assert (DOCS / feature.page).is_file()


def test_a_word_of_an_absent_feature_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    require_features({"batch": {"policy": "goodput"}, "track": None})
    monkeypatch.setattr(Feature, "is_here", False)
    require_features({"batch": {"policy": "fixed"}, "track": None})
    with pytest.raises(InputError, match=r"^batch\.policy: goodput: Elastic batches .* is not part of"):
        require_features({"batch": {"policy": "goodput"}})


@pytest.mark.parametrize(("name", "path"), re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", PAGE))
def test_each_arrow_and_type_of_the_page_is_in_its_file(name: str, path: str) -> None:
    top = path.removesuffix(".py").replace("/", ".")
    module = importlib.import_module(top if top.startswith("rubberband.") else f"rubberband.{top}")
    found = functools.reduce(getattr, name.split("."), module)
    assert found.__module__ == module.__name__
