"""Which hosts and pages a request may come by, and where the service may listen."""

from __future__ import annotations

import pytest

from rubberband.api.app.serving import is_loopback, require_auth, served_names, url_of
from rubberband.api.problems import FOREIGN_HOST, FOREIGN_ORIGIN, HttpProblem
from rubberband.api.security import safe_next
from rubberband.api.security.middleware import host_of, require_host, require_own_page
from rubberband.errors import InputError

SERVED = frozenset({"localhost", "127.0.0.1", "[::1]"})


@pytest.mark.parametrize(
    ("value", "host"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8265", "localhost"),
        ("localhost.:80", "localhost"),
        ("[::1]:8265", "[::1]"),
        ("[::1]", "[::1]"),
        ("127.0.0.1:", "127.0.0.1"),
        ("", ""),
    ],
)
def test_the_host_is_what_the_port_is_not(value: str, host: str) -> None:
    assert host_of(value) == host


@pytest.mark.parametrize("values", [[], [""], ["evil.example"], ["localhost", "localhost"], ["localhost@evil"], ["*"]])
def test_other_hosts_are_not_answered(values: list[str]) -> None:
    with pytest.raises(HttpProblem) as caught:
        require_host(values, SERVED)
    assert caught.value.kind is FOREIGN_HOST


def test_every_host_is_answered_only_if_the_operator_says_so() -> None:
    require_host(["anything"], frozenset({"*"}))
    with pytest.raises(HttpProblem):
        require_host(["anything"], SERVED)


@pytest.mark.parametrize(
    ("fetch_site", "origin", "own"),
    [
        (None, None, True),
        ("same-origin", "http://localhost:8265", True),
        ("none", None, True),
        ("same-site", "http://localhost:9", False),
        ("cross-site", "http://localhost:8265", False),
        (None, "http://localhost:8265", True),
        (None, "http://localhost:9", False),
        (None, "http://evil.example", False),
        (None, "http://localhost:8265.evil.example", False),
        (None, "http://evil.example/localhost:8265", False),
        (None, "null", False),
        (None, "http://[", False),
    ],
)
def test_pages_of_other_sites_change_nothing(fetch_site: str | None, origin: str | None, own: bool) -> None:
    require_own_page("GET", fetch_site=fetch_site, origin=origin, host="localhost:8265")
    if own:
        require_own_page("POST", fetch_site=fetch_site, origin=origin, host="localhost:8265")
        return
    with pytest.raises(HttpProblem) as caught:
        require_own_page("POST", fetch_site=fetch_site, origin=origin, host="localhost:8265")
    assert caught.value.kind is FOREIGN_ORIGIN


@pytest.mark.parametrize("wanted", ["/", "/plan?x=1", "/experiments/a%20b"])
def test_one_resumes_to_a_page_of_the_service(wanted: str) -> None:
    assert safe_next(wanted) == wanted


@pytest.mark.parametrize(
    "wanted", [None, "", "//evil", "https://evil", "/\\evil", "/a\nb", "/a b", "plan", "/é", "/" + "a" * 3000]
)
def test_and_nowhere_else(wanted: str | None) -> None:
    assert safe_next(wanted) == "/"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1"])
def test_on_loopback_tokens_are_a_choice(host: str) -> None:
    assert is_loopback(host)
    assert [require_auth(host, wanted) for wanted in (None, False, True)] == [False, False, True]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "tuning.example.org"])
def test_beyond_loopback_they_are_not(host: str) -> None:
    assert [require_auth(host, wanted) for wanted in (None, True)] == [True, True]
    with pytest.raises(InputError, match=r"--no-auth.*127\.0\.0\.1"):
        require_auth(host, False)


def test_nor_behind_a_proxy() -> None:
    assert require_auth("127.0.0.1", None, ["10.0.0.1"])
    with pytest.raises(InputError, match=r"proxy 10\.0\.0\.1"):
        require_auth("127.0.0.1", False, ["10.0.0.1"])


def test_the_service_answers_to_its_address_and_to_the_names_it_was_given() -> None:
    assert served_names("127.0.0.1", []) == ("127.0.0.1", "localhost", "[::1]")
    assert served_names("fd00::1", ["RB.example.org."])[:2] == ("rb.example.org", "[fd00::1]")
    assert served_names("0.0.0.0", ["*"])[0] == "*"
    assert "0.0.0.0" not in served_names("0.0.0.0", ["a"])


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_where_every_address_is_listened_on_a_name_is_needed(host: str) -> None:
    with pytest.raises(InputError, match="--host-name"):
        served_names(host, [])


@pytest.mark.parametrize("name", ["http://a", "a:80", "", "a b", "-a", "a/b"])
def test_a_name_is_a_host_alone(name: str) -> None:
    with pytest.raises(InputError, match="without scheme and port"):
        served_names("0.0.0.0", [name])


def test_the_address_is_one_that_a_browser_here_can_open() -> None:
    assert url_of("0.0.0.0", 80, https=False) == "http://127.0.0.1:80"
    assert url_of("::", 443, https=True) == "https://[::1]:443"
    assert url_of("localhost", 8265, https=False) == "http://localhost:8265"
