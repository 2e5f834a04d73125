"""`rubberband.integrations.optuna`: an objective of Optuna with one changed line, beside Optuna itself."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rubberband
from rubberband.executor.training.reporting import current_session
from rubberband.integrations import optuna as ours
from rubberband.spec.experiment import Experiment
from rubberband.values.environment import SPACE
from tests.builders.experiment_words import MINIMAL

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.ERROR)


def objective(config: Any) -> float:
    """The changed line is the first one: the same function runs in a study, too."""
    trial = ours.trial(config)
    lr = trial.suggest_float("lr", 1e-3, 1.0, log=True)
    step = trial.suggest_float("step", 0.0, 1.0, step=0.25)
    optimizer = trial.suggest_categorical("optimizer", ["sgd", "momentum", "adam"])
    beta = trial.suggest_float("beta", 0.1, 0.9) if optimizer == "momentum" else 0.0
    width = trial.suggest_int("width", 4, 64, log=True) + trial.suggest_int("even", 2, 10, step=2)
    trial.set_user_attr("width", width)
    loss = 9.0
    for epoch in range(3):
        loss *= 1.0 - lr * (1.0 - beta) + step / width
        trial.report(loss, epoch)
        assert not trial.should_prune()
    return loss


configurations = st.fixed_dictionaries(
    {
        "lr": st.floats(1e-3, 1.0),
        "step": st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
        "optimizer": st.sampled_from(["sgd", "momentum", "adam"]),
        "beta": st.floats(0.1, 0.9),
        "width": st.integers(4, 64),
        "even": st.sampled_from([2, 4, 6, 8, 10]),
    }
)


class Session:
    """A function trial's session that keeps what is reported."""

    class segment:  # noqa: N801
        trial, metric = 7, "loss"

    def __init__(self) -> None:
        self.reported = list[tuple[Mapping[str, Any], Any]]()

    def report(self, metrics: Mapping[str, Any], checkpoint: Any) -> None:
        self.reported.append((metrics, checkpoint))


def within(call: Callable[[], Any]) -> tuple[Any, list[tuple[Mapping[str, Any], Any]]]:
    """Call a function as a function trial calls it; what it returned and reported."""
    session: Any = Session()
    token = current_session.set(session)
    try:
        return call(), session.reported
    finally:
        current_session.reset(token)


@given(config=configurations)
def test_an_objective_returns_and_reports_what_it_does_in_a_study(config: dict[str, Any]) -> None:
    study = optuna.create_study()
    study.enqueue_trial(config)
    study.optimize(objective, n_trials=1)
    (theirs,) = study.trials
    value, reported = within(lambda: objective(config))
    assert (value, [metrics for metrics, _ in reported]) == (
        theirs.value,
        [{"loss": each} for each in theirs.intermediate_values.values()],
    )
    mine = ours.trial(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert [mine.suggest_uniform("beta", 0.1, 0.9), mine.suggest_loguniform("lr", 1e-3, 1.0)] == [
            config["beta"],
            config["lr"],
        ]
        assert mine.suggest_discrete_uniform("step", 0.0, 1.0, 0.25) == config["step"]
    assert mine.params == {name: config[name] for name in ("beta", "lr", "step")}


def test_a_trial_has_what_objectives_ask_it_for() -> None:
    trial, _ = within(lambda: ours.trial({"x": 1}, direction="maximize"))
    assert trial.number == 7
    assert trial.study.direction == optuna.study.StudyDirection.MAXIMIZE
    assert (trial.suggest_int("x", 0, 3), trial.params) == (1, {"x": 1})
    trial.set_user_attr("a", 1)
    assert trial.user_attrs == {"a": 1}
    with pytest.raises(AttributeError, match="without one"):
        _ = trial.relative_params
    with pytest.raises(ValueError, match="must be non-negative"):
        trial.report(1.0, -1)


def test_each_new_step_is_an_iteration_with_its_checkpoint() -> None:
    def call() -> None:
        trial = ours.trial({})
        for step, value in ((0, 1.0), (10, 2.0), (10, 3.0), (20, 4.0)):
            trial.report(value, step, checkpoint={"step": step})

    _, reported = within(call)
    assert reported == [({"loss": 1.0}, {"step": 0}), ({"loss": 2.0}, {"step": 10}), ({"loss": 4.0}, {"step": 20})]


def test_a_decorated_objective_reports_the_value_that_it_returns() -> None:
    @ours.objective
    def square(trial: Any) -> float:
        return float(trial.suggest_float("x", -1, 1) ** 2)

    assert within(lambda: square({"x": 0.5})) == (0.25, [({"loss": 0.25}, None)])
    study = optuna.create_study()
    study.optimize(square, n_trials=1)
    assert study.trials[0].value == study.trials[0].params["x"] ** 2
    for returned, line in (((1, 2), "returned 2 values"), ("x", "which is no number")):
        wrong = ours.objective(lambda trial, value=returned: value)
        with pytest.raises(SystemExit, match=line):
            within(lambda wrong=wrong: wrong({}))

    @ours.objective
    def pruned(trial: Any) -> float:
        raise optuna.TrialPruned

    with pytest.raises(SystemExit, match="rubberband: pruned has pruned this configuration itself"):
        within(lambda: pruned({}))


ASKED = {
    "suggest_float('x', 0, 1)": rubberband.uniform(0, 1),
    "suggest_float('x', 1e-3, 1, log=True)": rubberband.loguniform(1e-3, 1, base=2),
    "suggest_float('x', 0, 1, step=0.25)": rubberband.quniform(0, 1, 0.25),
    "suggest_float('x', 0.05, 0.5, step=0.15)": rubberband.choice([0.05, 0.2, 0.35, 0.5]),
    "suggest_int('x', 1, 9)": rubberband.randint(1, 10),
    "suggest_int('x', 1, 9, log=True)": rubberband.lograndint(1, 10),
    "suggest_categorical('x', ['a', 'b', None])": rubberband.choice(
        ["a", {"name": "b", "space": {"y": rubberband.uniform(0, 1)}}, None]
    ),
    "suggest_categorical('x', [1, 2.5, True])": rubberband.choice([1, 2.5, True]),
}


def found_with(space: Any, call: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    words = {**MINIMAL, "search": {**MINIMAL["search"], "space": space}}
    variables = Experiment(**words).environment({}).variables
    monkeypatch.setenv(SPACE, variables[SPACE])
    return eval(f"trial.{call}", {"trial": ours.trial(config)})


@pytest.mark.parametrize("call", ASKED)
def test_the_recorded_domain_is_taken_and_any_other_refused_in_one_line(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    domain = ASKED[call]
    option = domain.options[1] if domain.options else domain.draw(0.4)
    value = getattr(option, "name", option)
    assert found_with({"x": domain}, call, {"x": value}, monkeypatch) == value
    for other, recorded in ASKED.items():
        if other != call:
            with pytest.raises(SystemExit) as caught:
                found_with({"x": recorded}, call, {"x": value}, monkeypatch)
            line = str(caught.value)
            assert line.startswith("rubberband: x is ")
            assert "\n" not in line


def test_a_wider_range_in_the_objective_is_refused_and_a_chosen_value_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    wider, config = "suggest_float('x', 0, 2)", {"x": 0.5}
    with pytest.raises(SystemExit) as caught:
        found_with({"x": rubberband.uniform(0, 1)}, wider, config, monkeypatch)
    assert str(caught.value) == (
        "rubberband: x is uniform(0, 2) in the objective and uniform(0, 1) in the experiment's space; write the same "
        "in both, or run init again"
    )
    assert found_with({"x": 0.5}, wider, config, monkeypatch) == 0.5
    monkeypatch.setenv(SPACE, json.dumps({"x": {"type": "grid", "values": [0.5, 0.75]}}))
    assert ours.trial(config).suggest_float("x", 0, 2) == 0.5
    with pytest.raises(SystemExit, match=r"x=2\.5 is outside 0 to 2, which suggest_… has"):
        found_with({"x": 2.5}, wider, {"x": 2.5}, monkeypatch)
    with pytest.raises(SystemExit, match="the objective asks for x, which the experiment's space lacks; add it there"):
        found_with({"y": rubberband.uniform(0, 1)}, wider, {"y": 0.5}, monkeypatch)


def test_a_name_of_two_options_is_compared_with_that_of_the_chosen_one(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [
        {"name": "a", "space": {"x": rubberband.uniform(0, 1)}},
        {"name": "b", "space": {"x": rubberband.uniform(0, 2)}},
    ]
    space = {"kind": rubberband.choice(options)}
    wider = "suggest_float('x', 0, 2)"
    assert found_with(space, wider, {"kind": "b", "x": 0.5}, monkeypatch) == 0.5
    with pytest.raises(SystemExit, match=r"x is uniform\(0, 2\) in the objective and uniform\(0, 1\)"):
        found_with(space, wider, {"kind": "a", "x": 0.5}, monkeypatch)


def test_a_space_that_no_variable_holds_is_left_out() -> None:
    values = [f"{number:0100}" for number in range(2000)]
    words = {**MINIMAL, "search": {**MINIMAL["search"], "space": {"x": {"type": "choice", "values": values}}}}
    assert SPACE not in Experiment(**words).environment({}).variables


@pytest.mark.long
@pytest.mark.ray
def test_a_search_runs_an_objective_and_refuses_one_that_has_changed(tmp_path: Path) -> None:
    words: dict[str, Any] = {
        "constraints": {"deadline": "10m"},
        "resources": {"provider": "local", "gpus_per_instance": 1, "price_per_hour": 3, "max_instances": 1},
        "profile": {"seconds_per_iteration": {1: 0.1}},
        "verbose": 0,
        "home": tmp_path,
    }
    space = {
        "lr": optuna.distributions.FloatDistribution(1e-3, 1.0, log=True),
        "step": rubberband.quniform(0.0, 1.0, 0.25),
        "optimizer": rubberband.choice(
            ["sgd", {"name": "momentum", "space": {"beta": rubberband.uniform(0.1, 0.9)}}, "adam"]
        ),
        "width": rubberband.lograndint(4, 65),
        "even": rubberband.qrandint(2, 10, 2),
    }
    scheduler = {"type": "sha", "num_samples": 4, "max_t": 3, "reduction_factor": 2}
    search: dict[str, Any] = {"space": space, "scheduler": scheduler, "metric": "loss", "mode": "min"}
    result = rubberband.tune(objective, name="same", search=search, **words)
    best = result.best
    assert best is not None
    assert best.metrics["loss"] == objective(optuna.trial.FixedTrial(dict(best.config)))
    search["space"] = {**space, "lr": rubberband.loguniform(1e-3, 0.5)}
    with pytest.raises(rubberband.EntrypointError) as caught:
        rubberband.tune(objective, name="changed", search=search, **words)
    assert "lr is loguniform(0.001, 1.0) in the objective and loguniform(0.001, 0.5) in the e" in str(caught.value)
