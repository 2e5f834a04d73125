"""Where the service may listen, and by which names it answers: the rules that keep it from strangers. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from rubberband.errors import InputError
from rubberband.units import shown

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
ANY_NAME = "*"
_NAME = re.compile(r"[0-9a-z]([0-9a-z.-]*[0-9a-z])?|\[[0-9a-f:.]+\]", re.ASCII)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def require_auth(host: str, auth: bool | None, proxies: Sequence[str] = ()) -> bool:
    """Whether tokens are needed: beyond loopback always. Raises InputError where that was declined."""
    if is_loopback(host) and not proxies:
        return bool(auth)
    if auth is False:
        way = f"by the proxy {proxies[0]}" if proxies else f"at {host}"
        raise InputError(
            f"--no-auth: {way} other machines reach the service, where everybody could then spend your money; leave "
            "--no-auth out, or listen on 127.0.0.1 without a proxy"
        )
    return True


def served_names(host: str, names: Sequence[str]) -> tuple[str, ...]:
    """The values of the Host header that are answered: `names`, what is listened on, and this machine's own.

    Raises InputError for what is no name, and where every address is listened on and no name is given.
    """
    given = tuple(_checked(name) for name in names)
    address = _address(host)
    if address is not None and address.is_unspecified:
        if not given:
            raise InputError(
                f"--host {host} listens on every address; say by which names the service is asked for: "
                f"--host-name tuning.example.org (or --host-name '{ANY_NAME}', which lets any page on the web try)"
            )
        own: tuple[str, ...] = ()
    else:
        own = (host.lower() if address is None or address.version == 4 else f"[{address}]",)
    return tuple(dict.fromkeys((*given, *own, *LOOPBACK_NAMES)))


def url_of(host: str, port: int, *, https: bool) -> str:
    """Where a browser on this machine finds it."""
    address = _address(host)
    if address is not None and address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    shown_host = f"[{host}]" if ":" in host else host
    return f"{'https' if https else 'http'}://{shown_host}:{port}"


def _checked(name: str) -> str:
    lowered = name.strip().lower().removesuffix(".")
    if lowered != ANY_NAME and not _NAME.fullmatch(lowered):
        raise InputError(f"--host-name {shown(name)} is no host; write it without scheme and port: tuning.example.org")
    return lowered


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
