"""From `resources.aws` to launch parameters: image, network, installation, token.

It rents nothing. It creates what the account lacks and is free of charge: the security group, the published Ray token,
and this package's wheel in the bucket.
"""

from __future__ import annotations

import importlib.metadata
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from rubberband.cloud.aws import wheel
from rubberband.cloud.aws.boot import Boot, Installation, brings_the_package, installation, words_of, worker_script
from rubberband.cloud.aws.calls import AwsSession, Machines, NodeStart, Reservation
from rubberband.cloud.aws.errors import in_one_line
from rubberband.cloud.aws.images import built_image, find_image, root_volume_gb, type_facts
from rubberband.cloud.aws.network import OwnInstance, check_group, choose_subnets, ensure_group, own_place
from rubberband.cloud.aws.reservations import reservation_of
from rubberband.cloud.aws.s3 import Packages
from rubberband.cloud.aws.token import publish_token, token_parameter
from rubberband.cloud.aws.wheel import constraints, sent
from rubberband.cloud.ray_head import ray_node
from rubberband.errors import InputError
from rubberband.installation import DISTRIBUTION, install_hint, requirement
from rubberband.spec.resources import Aws


def resolve(
    session: AwsSession,
    words: Aws,
    instance_type: str,
    *,
    checkpoints: str | None = None,
    place: OwnInstance | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    token_path: Path | None = None,
    sleep: Callable[[float], None] = time.sleep,
    builds: bool = False,
) -> Machines:
    """Return the launch parameters of instances of one type. `checkpoints`: the store's URL, where the wheel is put.

    The owner's image with their environment (`rubberband cloud image build`) is used, unless this call `builds` one.
    `device`: where trials train; by default on the GPUs of a type that has some.
    `place` is where this machine is in EC2, by default as its metadata service says. Raises InputError (one line, with
    the remedy) for a wrong setting, in the file or in the account.
    """
    place = place or own_place()
    with in_one_line():
        facts = type_facts(session, instance_type)
        packages = Packages(session, checkpoints)
        installed = _to_install(packages, words)
        installs = bool(installed.requirements)
        own = None if builds else built_image(session, words, installed, facts)
        image = own or find_image(session, words.image, facts, installs=installs)
        plain = words.image is None and not facts.gpus and installs and own is None
        volume_gb = root_volume_gb(words.volume_gb, image, plain=plain)
        vpc, subnets = choose_subnets(session, words.subnets, instance_type, place)
        held = None if builds else reservation_of(session, words.reservation, instance_type)
        if held is not None:
            subnets = _in_zone(subnets, held)
        group = security_group(session, words, vpc, sleep)
        publish_token(session, words.owner, token_path)
    boot = Boot(
        region=session.region,
        token_parameter=token_parameter(words.owner),
        installation=installed,
        setup=words.setup,
        built=own is not None,
        ray_settings=ray_node.SETTINGS | ray_node.NETWORK_SETTINGS,
        device=device or ("cuda" if facts.gpus else "cpu"),
    )
    return Machines(
        image=image.image_id,
        subnets=subnets,
        security_group=group,
        instance_profile=words.worker_profile,
        key_name=words.key_name,
        owner=words.owner,
        volume_gb=volume_gb,
        root_device=image.root_device,
        further_disks=image.further_disks,
        reservation=held,
        user_data=partial(_script, packages, boot),
    )


def _script(packages: Packages, boot: Boot, start: NodeStart) -> str:
    """Return the boot script of an instance, whose packages are in the bucket."""
    packages.renew()
    return worker_script(boot, start)


def _in_zone(subnets: Mapping[str, str], held: Reservation) -> dict[str, str]:
    """Return the subnet in a reservation's zone. Raises InputError without one."""
    if held.zone not in subnets:
        raise InputError(
            f"resources.aws.subnets: {held.reservation_id} is in {held.zone}, and the subnets are in "
            f"{', '.join(subnets)}; add a subnet in {held.zone}"
        )
    return {held.zone: subnets[held.zone]}


def security_group(session: AwsSession, words: Aws, vpc: str, sleep: Callable[[float], None] = time.sleep) -> str:
    """Return the group that instances and the head share. Raises as `check_group` and `ensure_group` do."""
    if words.security_group is not None:
        return check_group(session, words.security_group, vpc)
    return ensure_group(session, words.owner, vpc, sleep=sleep)


def what_to_install(session: AwsSession | None, words: Aws, checkpoints: str | None) -> Installation:
    """Return what an instance installs: the file's requirements, and the driver's rubberband unless they name one.

    Packages have the driver's versions, except those whose version the file names. The driver's rubberband is sent as
    a wheel through the bucket of the checkpoints; with an index of the user's, its version is installed from there.
    Without a session nothing is put into the bucket. Raises InputError if there is neither.
    """
    return _to_install(Packages(session, checkpoints), words)


def _to_install(packages: Packages, words: Aws) -> Installation:
    install = words.install or ""
    if not brings_the_package(install):
        own = wheel.upload(packages) if words.index_url is None else _at_the_index()
        install = f"{own} {install}"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = installation(install, python=python, ray=_ray_version(), index_url=words.index_url)
    if not found.requirements:
        return found
    return replace(found, constraints=sent(packages, constraints(words_of(install))))


def _at_the_index() -> str:
    version = wheel.public_version()
    if version == "0":
        raise InputError(
            "resources.aws.index_url: this rubberband was never installed and has no version to ask for there; install "
            f"it (pip install -e .), or name one by resources.aws.install: {DISTRIBUTION}[ray,aws]==VERSION"
        )
    return f"{requirement('ray', 'aws')}=={version}"


def _ray_version() -> str:
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        raise InputError(f"ray is not installed here; run {install_hint('ray', 'aws')}") from None
