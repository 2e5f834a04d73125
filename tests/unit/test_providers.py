"""Providers of other packages: found by entry points, read strictly, and never in the way of our own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from pkgutil import resolve_name

import pytest
from pydantic import BaseModel, ConfigDict

from rubberband.api.body import require_allowed
from rubberband.api.problems import HttpProblem
from rubberband.api.settings import Settings
from rubberband.cloud.catalogue import InstanceType
from rubberband.cloud.local.provider import LocalProvider
from rubberband.cloud.offers import offers, price_source
from rubberband.cloud.provider import CleanedUp, ClusterProvider, Today
from rubberband.errors import InputError, JournalError
from rubberband.executor import RunSpec
from rubberband.planning.prices_and_quotas import cloud_prices_and_quotas, live_prices_and_quotas
from rubberband.spec.experiment import Experiment
from rubberband.spec.resources import Resources
from rubberband.values import kinds
from rubberband.values.kinds import KINDS, NOT_INSTALLED, OWN, ProviderKind, part_of, provider_faults
from tests.builders.cli_runs import run
from tests.builders.experiment_words import MINIMAL

Install = Callable[..., None]

ACME = ProviderKind(
    open_cluster="acme_cloud:open_cluster",
    options=f"{__name__}:Options",
    instance_types=f"{__name__}:types",
    prices=f"{__name__}:prices",
    preflight=f"{__name__}:preflight",
    clean_up=f"{__name__}:clean_up",
    is_rented=True,
    provision_s=30.0,
    init_s=60.0,
    release_margin_s=30.0,
)


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    project: str
    disk_gb: int = 10


def types(resources: Resources, _environment: object) -> dict[str, InstanceType]:
    usd = 2.5 if resources.options["project"] == "cheap" else 5.0
    return {"big": InstanceType(instance_type="big", gpus=4, prices_usd_per_hour={resources.region: usd})}


def prices(_resources: Resources, _home: Path, _until: float) -> Today:
    return Today(room={"big": {"on_demand": 3}}, notes=["acme was asked"])


def preflight(
    resources: Resources, home: Path, until: float, announce: Callable[[str], None], *, on_head: bool
) -> Today:
    announce("3 more")
    return prices(resources, home, until)


def clean_up(_home: Path, name: str | None) -> CleanedUp:
    return CleanedUp(ended=[f"vm-1 of {name}"], notes=["acme was asked"])


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package with an entry point on the path, as pip does."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def install(name: str = "acme", value: str = f"{__name__}:ACME", *, package: str = "acme-cloud") -> None:
        info = site / f"{package.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{kinds.ENTRY_POINTS}]\n{name} = {value}\n")
        kinds.look_again()

    yield install
    kinds.look_again()


def resources(**words: object) -> Resources:
    return Resources(**{"provider": "acme", "instance_type": "big", "options": {"project": "a"}, **words})


def test_a_provider_of_a_package_is_found_after_our_own(install: Install) -> None:
    install()
    assert list(KINDS) == [*OWN, "acme"]
    assert resources().kind is ACME


def test_its_types_have_its_prices(install: Install) -> None:
    install()
    (offer,) = offers(resources())
    assert (offer.gpus, offer.price_usd_per_hour, offer.side_costs) == (4, 5.0, ())
    assert (offer.provision_delay_s, offer.init_delay_s) == (30.0, 60.0)
    assert offers(resources(options={"project": "cheap"}))[0].price_usd_per_hour == 2.5
    assert price_source(resources(), "big")[1] == "provider acme"
    with pytest.raises(InputError, match=r"'p3.8xlarge' is not in the catalogue"):
        offers(resources(instance_type="p3.8xlarge"))
    with pytest.raises(InputError, match=r"provider acme needs one; add it, such as instance_type: big"):
        offers(resources(instance_type=None))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"options": {}}, r"options.project: is required; add it"),
        ({"options": {"project": "a", "disk": 3}}, r"options.disk: "),
        ({"options": {"project": "a", "disk_gb": "x"}}, r"options.disk_gb: 'x' is not a whole number"),
        ({"region": "us-east-1"}, r"region: there are no regions, and provider is acme; leave it out"),
        ({"market": "spot"}, r"market: there is no spot market, and provider is acme"),
        ({"aws": {"image": "ami-1"}}, r"aws: it is read with provider: aws, and provider is acme"),
        ({"address": "head:6379"}, r"address: it is read with provider: ray"),
        ({"provider": "local"}, r"options: provider local has none; leave them out"),
        ({"provider": "acne"}, r"provider: 'acne' is not installed here; did you mean 'acme'\?"),
        ({"provider": "xyz"}, r"provider: 'xyz' is not installed here; known are local, aws, ray, virtual, acme"),
    ],
)
def test_a_word_that_it_does_not_read_is_refused(install: Install, words: dict[str, object], why: str) -> None:
    install()
    with pytest.raises(InputError, match=why):
        Experiment.kept(
            {
                "name": "a",
                "search": {
                    "scheduler": {"type": "sha", "num_samples": 4, "max_t": 4},
                    "space": {"lr": {"type": "uniform", "lower": 0.0, "upper": 1.0}},
                    "metric": "loss",
                    "mode": "min",
                },
                "resources": {"provider": "acme", "instance_type": "big", "options": {"project": "a"}, **words},
            }
        )


def test_an_experiment_keeps_its_words(install: Install) -> None:
    install()
    kept = resources().model_dump(mode="json", by_alias=True)
    assert Resources(**kept) == resources()
    assert kept["region"] == "acme"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("no_such_module:RECORD", "ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{__name__}:Options", "is no ProviderKind with open_cluster"),
        (f"{__name__}:SIMULATED", "one of is_this_machine, is_rented and is_borrowed must be True"),
        (f"{__name__}:NOWHERE", "one of is_this_machine, is_rented and is_borrowed must be True"),
        (f"{__name__}:TWOFOLD", "one of is_this_machine, is_rented and is_borrowed must be True"),
    ],
)
def test_a_broken_package_is_one_line_and_spares_our_own(install: Install, value: str, why: str) -> None:
    install(value=value)
    assert list(KINDS) == list(OWN)
    assert [why in fault for fault in provider_faults()] == [True]
    with pytest.raises(InputError, match=r"^provider acme of acme-cloud 1\.2 cannot be used: .*; update or uninstall"):
        part_of("acme", "open_cluster")
    assert "acme" not in KINDS
    assert KINDS.get("acme", NOT_INSTALLED) is NOT_INSTALLED
    assert Resources(provider="local").kind is OWN["local"]


SIMULATED = ProviderKind(open_cluster="a:b", is_simulated=True, release_margin_s=0.0)
NOWHERE = ProviderKind(open_cluster="a:b", release_margin_s=0.0)
TWOFOLD = ProviderKind(open_cluster="a:b", is_rented=True, is_borrowed=True, release_margin_s=0.0)


def test_two_packages_with_one_name_are_refused(install: Install) -> None:
    install()
    install(package="other-cloud")
    assert provider_faults() == [
        "provider acme is registered by acme-cloud 1.2 and other-cloud 1.2; uninstall all but one"
    ]
    assert "acme" not in KINDS


def test_our_own_names_are_never_replaced(install: Install) -> None:
    install(name="aws")
    assert KINDS["aws"] is OWN["aws"]
    assert provider_faults() == ["provider aws of acme-cloud 1.2 is left out: the name is rubberband's own"]


def test_a_function_that_its_package_lacks_is_named(install: Install) -> None:
    install()
    why = r"open_cluster is 'acme_cloud:open_cluster' \(ModuleNotFoundError: No module named 'acme_cloud'\); update"
    with pytest.raises(InputError, match=why):
        part_of("acme", "open_cluster")


@pytest.mark.parametrize("name", OWN)
def test_our_own_records_name_functions_that_exist(name: str) -> None:
    parts = [part for part, value in asdict(OWN[name]).items() if ":" in str(value)]
    assert all(callable(part_of(name, part)) for part in parts)


def test_its_account_is_asked_for_prices_and_before_a_run(install: Install, tmp_path: Path) -> None:
    install()
    words = {**MINIMAL, "resources": {"provider": "acme", "instance_type": "big", "options": {"project": "a"}}}
    experiment, remarks = Experiment(**words), list[str]()
    assert live_prices_and_quotas(experiment, tmp_path).room == {"big": {"on_demand": 3}}
    assert cloud_prices_and_quotas(experiment, tmp_path, remarks.append).notes == ("acme was asked",)
    assert remarks == ["3 more"]


def test_cleanup_asks_every_provider(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RUBBERBAND_HOME", str(tmp_path / "home"))
    install()
    install(name="aws", package="wrong-cloud")
    assert run(monkeypatch, "cleanup", "digits") == 0
    out, err = capsys.readouterr()
    assert out == "ended vm-1 of digits\n"
    assert "acme was asked" in err
    assert "provider aws of wrong-cloud 1.2 is left out" in err


def test_a_service_allows_the_provider_and_refuses_options(install: Install) -> None:
    install()
    install("plain", f"{__name__}:PLAIN", package="plain-cloud")
    settings = Settings(home=Path("/nowhere"), entrypoints=("mine:*",), providers=("acme", "plain"))

    def experiment(**words: object) -> Experiment:
        usual = {"instance_type": "big", "gpus_per_instance": 2, "price_per_hour": 3.0}
        return Experiment(**{**MINIMAL, "entrypoint": "mine:Trial", "resources": {**usual, **words}})

    require_allowed(experiment(provider="plain"), settings)
    with pytest.raises(HttpProblem, match=r"resources.options.project: only the operator sets up instances"):
        require_allowed(experiment(provider="acme", options={"project": "a"}), settings)
    with pytest.raises(HttpProblem, match=r"resources.provider: plain is not allowed here; use acme"):
        require_allowed(experiment(provider="plain"), replace(settings, providers=("acme",)))


def test_a_resume_asks_for_the_package_that_is_missing() -> None:
    with pytest.raises(JournalError, match=r"provider: 'acme' cannot be used here; install the package that brings it"):
        RunSpec.from_json({"provider": "acme"})


PLAIN = replace(ACME, options=None, instance_types=None)


def test_help_and_our_own_look_at_no_package() -> None:
    code = (
        "import rubberband.cli; from rubberband.spec.resources import Resources; from rubberband.values import kinds; "
        "Resources(provider='aws', instance_type='g5.xlarge').kind; assert not kinds._installed.cache_info().misses"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_instances_of_this_machine_start_before_they_are_asked_for() -> None:
    opened = [
        resolve_name(kind.open_cluster) for kind in KINDS.values() if kind.open_cluster and not kind.is_this_machine
    ]
    assert opened
    early = {found for found in every(ClusterProvider) if "launch_early" in vars(found)}
    assert early == {LocalProvider}
    assert [name for name, kind in KINDS.items() if kind.is_this_machine] == ["local"]


def every(kind: type) -> set[type]:
    """Return all classes that are derived from one."""
    return {found for below in kind.__subclasses__() for found in {below, *every(below)}}
