"""The variables that an experiment gives to its trials' processes, and the masking of secrets in what these write."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import quote, quote_plus

HASH_SEED = "PYTHONHASHSEED"
"""Variable that is read when a process starts: with one value, sets of texts have one order in all starts."""
SPACE = "RUBBERBAND_SPACE"
"""Variable of trials' processes: the search space, in the file's words as JSON."""
LONGEST_SPACE = 100_000
"""Bytes of it: a longer one is left out, as Linux starts no program with a variable of more than 128 KiB."""
MASK = "***"
LEAST_SECRET = 4
"""Characters of a secret: a shorter one is in many words, which a log would lose."""
_LEAST_LINE = 8
"""Characters from which a line of a secret (a key, a file) is masked on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Variables of a process, by name."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """`resources.env`."""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """`resources.secrets` with the values of the driver's environment: they are never written down."""

    @property
    def hash_seed(self) -> str:
        """The value of PYTHONHASHSEED, which processes need when they start."""
        return self.variables.get(HASH_SEED, "0")

    def put(self) -> None:
        """Set them in this process, for itself and for those that it starts."""
        os.environ.update({**self.variables, **self.secrets})

    @contextmanager
    def within(self) -> Iterator[None]:
        """Set them while this lasts."""
        before = {name: os.environ.get(name) for name in (*self.variables, *self.secrets)}
        self.put()
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def masks(self) -> list[str]:
        """Return the texts to mask, the longest first: each secret as it is, as in JSON, and as in a URL; its lines."""
        texts = set[str]()
        for value in self.secrets.values():
            texts |= {
                value,
                json.dumps(value)[1:-1],
                repr(value)[1:-1],
                quote(value),
                quote(value, safe=""),
                quote_plus(value),
            }
            texts |= {line.strip() for line in value.splitlines() if len(line.strip()) >= _LEAST_LINE}
        return sorted(texts, key=lambda text: (-len(text), text))

    def masked(self, text: str) -> str:
        """Return a text without the values of secrets."""
        for value in self.masks():
            text = text.replace(value, MASK)
        return text
