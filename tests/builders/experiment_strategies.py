"""Random experiment files."""

from __future__ import annotations

import string
from datetime import UTC

from hypothesis import strategies as st

from tests.builders.experiment_words import words

yaml_like = st.lists(
    st.sampled_from([*"[]{}:,-?&*!|>'\"%@`#~ \n\t", "name", "search", "space", "a: ", "- ", "1e-4", "<<", "---", "..."])
    | st.text(max_size=4),
    max_size=40,
).map("".join)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


constants = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


numbers = st.floats(1e-6, 1e6)


domains = st.one_of(
    constants,
    st.tuples(numbers, numbers)
    .filter(lambda pair: pair[0] < pair[1])
    .flatmap(
        lambda pair: st.sampled_from(["uniform", "loguniform"]).map(
            lambda kind: {"type": kind, "lower": pair[0], "upper": pair[1]}
        )
    ),
    st.lists(constants, min_size=1, max_size=4).map(lambda values: {"type": "choice", "values": values}),
)


seconds = st.floats(0, 1e6)


delays = st.one_of(
    st.none(),
    seconds,
    st.fixed_dictionaries({"mean": seconds}, optional={"cv": st.floats(0, 10)}),
    st.fixed_dictionaries({"samples": st.lists(seconds, min_size=1, max_size=5)}),
)


resources = st.fixed_dictionaries(
    {"price_per_hour": st.floats(0.01, 100), "provision_delay": delays, "init_delay": delays},
    optional={
        "market": st.sampled_from(["spot", "on_demand"]),
        "spot": st.fixed_dictionaries(
            {}, optional={"price_per_hour": numbers, "interruptions_per_hour": st.floats(0, 10), "restart": seconds}
        ),
    },
)


experiments = st.builds(
    lambda name, space, deadline, cost, seed, table, resources: words(
        name=name,
        resources=resources,
        search__space=space,
        search__sampler={"seed": seed},
        constraints={"deadline": deadline, "max_cost": cost},
        profile={"seconds_per_iteration": table},
    ),
    st.text(string.ascii_lowercase + string.digits + "-", min_size=1, max_size=63).filter(lambda name: name[0] != "-"),
    st.dictionaries(texts, domains, max_size=4),
    st.floats(1, 1e6) | st.datetimes(timezones=st.just(UTC)),
    st.none() | st.floats(0.01, 1e6),
    st.integers(0, 2**63 - 1),
    st.dictionaries(st.integers(1, 64), st.floats(1e-3, 1e5), min_size=1, max_size=4),
    resources,
)
