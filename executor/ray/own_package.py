"""The rubberband of this process for nodes of a borrowed cluster that have none, or another one: by Ray's runtime_env.

It is a zip in the head's store. A node unpacks it once, and finds it before its own packages. Further imports of a
worker (numpy, and the packages of the trial) must be on the node.
"""

from __future__ import annotations

import hashlib
import threading
from functools import cache
from typing import Any

from ray._private.runtime_env.packaging import package_exists, pin_runtime_env_uri, upload_package_to_gcs

from rubberband.cloud.wheel import build_wheel

_sending = threading.Lock()


def runtime_env() -> dict[str, Any]:
    """Return the environment of a process that has it; it is sent, unless the head has it. The driver is connected.

    Ray drops it once no process uses it. Raises InputError if its files cannot be read.
    """
    content = _zip()
    uri = f"gcs://_ray_pkg_{hashlib.sha1(content).hexdigest()}.zip"
    with _sending:
        pin_runtime_env_uri(uri)
        if not package_exists(uri):
            upload_package_to_gcs(uri, content)
    return {"py_modules": [uri]}


@cache
def _zip() -> bytes:
    return build_wheel()[1]
