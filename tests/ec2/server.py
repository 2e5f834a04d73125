"""The fake over HTTP: boto3 with AWS_ENDPOINT_URL, and scripts with curl, work with it unchanged.

One address for everything: the services by the name in the signature (which is not checked, but who signed decides what
is allowed), S3 in path style, and instance metadata under `/machine/<id>`.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from tests.ec2 import wire
from tests.ec2.buckets import Files
from tests.ec2.client import REGIONAL
from tests.ec2.core import FakeAws
from tests.ec2.faults import FakeDisconnect, FakeError
from tests.ec2.instance import Instance
from tests.ec2.metadata import Facts, Metadata
from tests.ec2.principals import BUCKET, PRINCIPALS, arn_of
from tests.ec2.world import REGIONS

DRIVER: Final = "driver"
"""The machine on which the driver runs: in the account's default VPC, with the driver's role."""
SECRET_KEY: Final = "any-secret-will-do"

_METADATA_PATH = "/machine/"
_KEY_PREFIX = "ASIARUBBERBAND"
_REGIONLESS = ("pricing", "sts", "s3", "iam", "budgets", "freetier")
_ADDRESS = "127.0.0.1"


def access_key(principal: str) -> str:
    """The access key id by which the server knows `principal` (`driver`, `worker`, `admin`)."""
    return _KEY_PREFIX + principal.upper()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    """Whoever comes while so many wait for the door tries again only a second later."""


class FakeServer:
    """A front of `fake` on a port of this machine; objects of its S3 are files under `directory`.

    `address`: what machines are told is their private address. A context manager; it listens while in the block.
    """

    def __init__(self, fake: FakeAws, directory: Path, *, address: str = _ADDRESS) -> None:
        self.fake = fake
        fake.world.new_bucket = lambda name: Files(directory / name)
        fake.world.bucket_of_policies = BUCKET
        fake.world.buckets = {path.name: Files(path) for path in sorted(directory.glob("*"))}
        self.refuses: Callable[[str], FakeError | None] = lambda service: None
        """What a service answers to every request, such as to credentials that have expired."""
        self._address = address
        self._metadata = Metadata(fake.clock, self._facts, self._reclaim_at)
        self._http = _Http((_ADDRESS, 0), _handler(self))
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="fake AWS", daemon=True)

    @property
    def url(self) -> str:
        return f"http://{_ADDRESS}:{self._http.server_address[1]}"

    def metadata_url(self, machine: str = DRIVER) -> str:
        """What AWS_EC2_METADATA_SERVICE_ENDPOINT is to be set to on a machine (an instance id, or the driver's)."""
        return f"{self.url}{_METADATA_PATH}{machine}"

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def respond(self, request: Request) -> wire.Response | None:
        """The answer to a request; None: the connection is closed without one.

        A defect of the fake is answered with 501 and what it was, which no client tries again.
        """
        try:
            if request.path.startswith(_METADATA_PATH):
                machine, _, path = request.path.removeprefix(_METADATA_PATH).partition("/")
                return self._metadata.handle(machine, request.method, path, request.headers)
            return self._call(request)
        except FakeDisconnect:
            return None
        except Exception as error:
            traceback.print_exc()
            return wire.encode_error("s3", "NotImplemented", f"the fake fails at this: {error!r}", 501)

    def _call(self, request: Request) -> wire.Response | None:
        caller = wire.caller(request.headers)
        if caller is None:
            return wire.encode_error(
                "ec2", "MissingAuthenticationToken", "Request is missing Authentication Token", 403
            )
        principal, refusal = _principal(caller.access_key), self.refuses(caller.service)
        try:
            if refusal is not None:
                raise refusal
            operation, params = wire.decode(
                caller.service, request.headers, request.body, method=request.method, target=request.target
            )
            self._check(caller, principal)
            fake = self.fake.in_region(caller.region) if caller.service in REGIONAL else self.fake
            result = fake.call(caller.service, operation, params, principal or "nobody")
            return wire.encode(caller.service, operation, result)
        except FakeError as error:
            return wire.encode_error(caller.service, error.code, error.message, error.http_status)
        except wire.MalformedRequest as error:
            return wire.encode_error("s3", "MalformedRequest", str(error), 400)

    def _check(self, caller: wire.Caller, principal: str | None) -> None:
        """Raises FakeError, with the code that the service in question has for it, unless the caller is known here."""
        known_region = (
            caller.region == self.fake.region
            or caller.service in _REGIONLESS
            or (caller.service in REGIONAL and caller.region in REGIONS)
        )
        if principal is not None and known_region:
            return
        if caller.service == "ec2":
            message = "AWS was not able to validate the provided access credentials"
            raise FakeError("AuthFailure", message, 401)
        codes = {"sts": "InvalidClientTokenId", "iam": "InvalidClientTokenId", "s3": "InvalidAccessKeyId"}
        code = codes.get(caller.service, "UnrecognizedClientException")
        raise FakeError(code, "The security token included in the request is invalid.", 403)

    def _facts(self, machine: str) -> Facts | None:
        if machine == DRIVER:
            return self._driver_facts()
        instance = self._running(machine)
        return None if instance is None else self._facts_of(instance)

    def _facts_of(self, instance: Instance) -> Facts:
        role = None if instance.profile is None else self.fake.world.profiles[instance.profile]
        return Facts(
            instance_id=instance.instance_id,
            address=self._address,
            zone=instance.zone,
            vpc_id=instance.vpc_id,
            subnet_id=instance.subnet_id,
            security_groups=tuple(group for group, _ in instance.groups),
            role=role,
            access_key=access_key("worker" if role is not None and "worker" in role else DRIVER),
            launch_index=instance.launch_index,
        )

    def _driver_facts(self) -> Facts:
        world = self.fake.world
        vpc_id = next(iter(world.vpcs))
        subnet = next(one for one in world.subnets.values() if one.vpc_id == vpc_id)
        _, role, instance_id = arn_of(DRIVER).split("/")
        groups = tuple(one.group_id for one in world.groups.values() if one.vpc_id == vpc_id)
        return Facts(
            instance_id=instance_id,
            address=self._address,
            zone=subnet.zone,
            vpc_id=vpc_id,
            subnet_id=subnet.subnet_id,
            security_groups=groups[:1],
            role=role,
            access_key=access_key(DRIVER),
        )

    def _running(self, machine: str) -> Instance | None:
        self.fake.tick()
        instance = self.fake.world.instances.get(machine)
        return instance if instance is not None and instance.state(self.fake.clock()) == "running" else None

    def _reclaim_at(self, machine: str) -> float | None:
        """When a spot instance is taken away, once that was announced."""
        instance = self.fake.world.instances.get(machine)
        return None if instance is None or instance.notice_at is None else instance.reclaim_at


class Request:
    def __init__(self, method: str, target: str, headers: Any, body: bytes) -> None:
        path, _, self.query = target.partition("?")
        self.method, self.path, self.target, self.headers, self.body = method, path, target, headers, body


def _principal(key: str) -> str | None:
    name = key.removeprefix(_KEY_PREFIX).lower()
    return name if key.startswith(_KEY_PREFIX) and name in PRINCIPALS else None


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def respond(self) -> None:
            request = Request(self.command, self.path, self.headers, self.read_body())
            response = server.respond(request)
            if response is None:
                self.close_connection = True
                return
            self.send_response_only(response.status)
            for name, value in {"Content-Length": str(len(response.body)), **response.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(response.body)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = respond  # noqa: N815

        def read_body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
                return self.read_chunks()
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def read_chunks(self) -> bytes:
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(parts)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
