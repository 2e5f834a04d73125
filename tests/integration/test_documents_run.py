"""README and docs/: the blocks that need a service beside them, and those that start Ray."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from tests.builders.documents import PAGES, Block, Reader, agrees, blocks, commands
from tests.builders.server_process import ServerProcess, serving

PLACES = {
    place: [page for page in PAGES if any(b.place == place for b in blocks(page))] for place in ("service", "ray")
}
ADDRESS = "127.0.0.1:8642"


def options_of(serve: Block) -> list[str]:
    """What the page gives `rubberband serve`."""
    (command,) = commands(serve.text)
    words = shlex.split(command.words)
    assert words[:2] == ["rubberband", "serve"]
    assert command.expected.startswith(f"serving on   http://{ADDRESS}\n")
    return words[2:]


def elsewhere(text: str, server: ServerProcess) -> str:
    """A block for a server that does not listen on the usual port, which another may have."""
    host = server.address.partition("//")[2]
    text = text.replace(ADDRESS, host).replace("localhost:8642", host)
    return text.replace("rubberband submit ", f"rubberband submit --server {server.address} ")


@pytest.mark.long
@pytest.mark.parametrize("page", PLACES["service"], ids=lambda page: page.stem)
def test_the_blocks_beside_a_service(page: Path, tmp_path: Path) -> None:
    serve, *others = [block for block in blocks(page) if block.place == "service"]
    reader = Reader(tmp_path)
    with serving(tmp_path / "home", "--code", str(reader.folder), *options_of(serve)) as server:
        for block in others:
            if block.text.startswith("$ curl ") and shutil.which("curl") is None:
                continue
            reader.run(block, lambda text: elsewhere(text, server))


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PLACES["ray"], ids=lambda page: page.stem)
def test_the_blocks_that_start_ray(page: Path, tmp_path: Path) -> None:
    if page.stem == "finetune":
        pytest.importorskip("trl", reason="pip install 'rubberband-tune[finetune]'")
    reader = Reader(tmp_path)
    for block in blocks(page):
        if block.title is not None:
            reader.save(block)
        elif block.place == "ray":
            for command in commands(block.text):
                printed = reader.shell(command.words)
                assert agrees(command.expected, printed), f"{block}: {command.words}\n{printed}"
