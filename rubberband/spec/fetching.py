"""`resources.fetch`: base models and data that each instance has before trials start on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from rubberband.spec.fields import Words, fault
from rubberband.units import shown

_PART = r"\w([\w.-]*\w)?"
_NAME = re.compile(rf"(?![^@]*(--|\.\.)){_PART}(/{_PART})?(@[^\s@]+)?", re.ASCII)
_MIRROR = re.compile(r"s3://[^/\s]+(/\S*)?")
LATEST = "main"
"""Revision of a bare name."""


class Source(NamedTuple):
    """A model or a dataset of the hub."""

    kind: str
    """`model` or `dataset`."""
    name: str
    revision: str
    """A branch, a tag or a commit."""

    @property
    def key(self) -> str:
        """Its key in `resources.fetch.commits`."""
        return f"{'datasets/' if self.kind == 'dataset' else ''}{self.name}@{self.revision}"

    @property
    def place(self) -> str:
        """The line of the experiment file that has it, as errors name it."""
        return f"resources.fetch.{self.kind}s"


def _source(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise fault(f"{shown(text)} is no name of the hub; write OWNER/NAME, or OWNER/NAME@REVISION")
    return text


def _mirror(url: str) -> str:
    if not _MIRROR.fullmatch(url):
        raise fault(f"{shown(url)} is no folder of a bucket; write s3://bucket/prefix")
    return url


Sources = Annotated[tuple[Annotated[str, AfterValidator(_source)], ...], Field(max_length=100)]


class Fetch(Words):
    """Models and datasets of the Hugging Face hub that each instance downloads once, before its trials start."""

    models: Sources = ()
    """Names of models, such as meta-llama/Llama-3.2-1B, or with a revision: NAME@REVISION."""
    datasets: Sources = ()
    """Names of datasets, such as trl-lib/Capybara, or with a revision."""
    mirror: Annotated[str, AfterValidator(_mirror)] | None = Field(None, alias="from")
    """Folder of a bucket (`s3://bucket/prefix`) that the first instance fills from the hub, and later ones read."""
    commits: dict[str, Annotated[str, Field(pattern="^[0-9a-f]{40}$")]] = Field(default_factory=dict)
    """NAME@REVISION (of a dataset: datasets/NAME@REVISION) -> its commit. A run writes them when it is planned, so that
    all instances have the same files."""

    @property
    def sources(self) -> tuple[Source, ...]:
        """The models, then the datasets."""
        return tuple(self._sources())

    def _sources(self) -> Iterator[Source]:
        for kind, texts in (("model", self.models), ("dataset", self.datasets)):
            for text in texts:
                name, _, revision = text.partition("@")
                yield Source(kind, name, revision or LATEST)

    @model_validator(mode="after")
    def _each_once(self) -> Fetch:
        found = self.sources
        if not found:
            raise fault("has no models and no datasets; name one, or leave it out")
        for index, source in enumerate(found):
            if any(source[:2] == other[:2] for other in found[:index]):
                raise fault(f"{source.name} occurs twice; keep one revision", at=f"{source.kind}s")
        return self
