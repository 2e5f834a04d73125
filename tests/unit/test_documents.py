"""README and docs/: what they show is true, and what can be run without Ray is run (tests/builders/documents.py)."""

from __future__ import annotations

import configparser
import importlib
import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer.main
import yaml

import rubberband
from rubberband.cli import app
from rubberband.installation import default_home
from rubberband.spec.experiment import Experiment
from rubberband.spec.loading import load_experiment, parse_experiment
from rubberband.states import ExperimentState
from tests.builders.documents import PAGES, PLACES, ROOT, Block, Reader, agrees, blocks, commands, kept_files
from tests.builders.tables import cases
from tests.builders.trained import trained

README = ROOT / "README.md"
ALL = [block for page in PAGES for block in blocks(page)]
SET_UP = [block for block in ALL if block.page == README and block.language == "sh"]


def test_every_block_is_known() -> None:
    for block in ALL:
        assert block.language in LANGUAGES, f"{block}: a block of {block.language}; say how it is tested"
        assert block.language != "console" or block.reason or block.text.startswith("$ "), f"{block}: no command"
        assert block.place in PLACES or block.reason, f"{block}: <!-- run: {block.place} --> is none of {list(PLACES)}"
    fences = sum(len(re.findall(r"^```\w", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES)
    assert fences == len(ALL), "a block is written in a way that is not found"


def test_readme_has_two_set_up_commands_that_ci_runs() -> None:
    assert [block.text.count("\n") for block in SET_UP] == [1, 1]
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert -1 < ci.index('HOME="$work/home"') < ci.index("readme 0 >") < ci.index("readme 1 >"), (
        "in one home, in this order"
    )


def test_tests_read_nothing_of_the_users_home(tmp_path_factory: pytest.TempPathFactory) -> None:
    """README's first command leaves measured start times there, which would change what its second one expects."""
    assert default_home().is_relative_to(tmp_path_factory.getbasetemp().resolve())
    assert not {"RUBBERBAND_SERVER", "AWS_PROFILE", "LANG"} & os.environ.keys()


def test_readme_fits_two_screens() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize(
    "path",
    [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md"))],
    ids=lambda path: path.name,
)
def test_links_to_files_lead_somewhere(path: Path) -> None:
    """Those of the site are checked when it is built, where pages are; README's and those out of docs/ are not."""
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link and not link.startswith("reference/")]
    assert [link for link in local if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if any(b.page == page for b in ALL)], ids=lambda p: p.stem)
def test_the_blocks_of(page: Path, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for block in blocks(page):
        if block.title is not None:
            reader.save(block)
        if block.place == "" and block not in SET_UP:
            LANGUAGES[block.language](reader, block)


def run(reader: Reader, block: Block) -> None:
    """A block that is run as it stands."""
    reader.run(block)


def read_yaml(reader: Reader, block: Block) -> None:
    """An experiment, or keys to add to one; or the file of another program, which has a title."""
    words = yaml.safe_load(block.text)
    if {"search", "batch", "training", "profile", "resources"} & words.keys():
        example = yaml.safe_load((ROOT / "examples/digits.yaml").read_text(encoding="utf-8"))
        if "search" in words and "name" not in words:
            rest = yaml.safe_dump({key: value for key, value in example.items() if key not in words})
            whole = f"{block.text}{rest}"
        else:
            whole = block.text if "search" in words else yaml.safe_dump(_merged(example, words))
        parse_experiment(whole)
    else:
        assert block.title is not None, f"{block}: neither an experiment nor another program's file"


def _merged(example: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    """The example with a page's keys in place of its own; instance types, or GPUs and a price, not both."""
    resources = dict(example["resources"]) | dict(words.get("resources", {}))
    if "instance_type" in resources or "instance_types" in resources:
        del resources["gpus_per_instance"], resources["price_per_hour"]
    return {**example, **words, "resources": resources}


def read_unit(reader: Reader, block: Block) -> None:
    """A unit of systemd: the command that it starts has the options that it gives."""
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(block.text)
    program, name, *words = shlex.split(unit["Service"]["ExecStart"])
    group: Any = typer.main.get_command(app)
    known = {option for parameter in group.commands[name].made().params for option in parameter.opts}
    assert Path(program).name == "rubberband"
    assert {word for word in words if word.startswith("--")} <= known


def read_json(reader: Reader, block: Block) -> None:
    json.loads(block.text)


def look_at_text(reader: Reader, block: Block) -> None:
    """README's output has the lines of a run, but for their numbers; other text is prose or a drawing."""
    if block.page != README:
        return
    with trained():
        printed = reader.run(_commands(block, RUN_ON_A_VIRTUAL_CLOCK))
    shapes = {shape(line) for line in printed.splitlines()}
    assert [line for line in block.text.splitlines() if line != "..." and shape(line) not in shapes] == []


RUN_ON_A_VIRTUAL_CLOCK = "rubberband run examples/digits.yaml -s resources.provider=virtual"


def _commands(block: Block, text: str) -> Block:
    return Block(
        page=block.page, line=block.line, language="console", title=None, place="", reason="", text=f"$ {text}"
    )


def shape(line: str) -> str:
    """A line of a run without what differs from run to run."""
    line = re.sub(r"\(trials? [^)]*\)", "(trial)", line)
    line = re.sub(r"(?<=[a-z])=[\w.+-]+", "=", line)
    line = re.sub(r"^(best:|configuration:).*", r"\1", line)
    line = re.sub(r"\b(\d+(\.\d+)?[dhms])+\b", "D", line)
    line = re.sub(r"-?\d+(\.\d+)?", "N", line)
    line = re.sub(r"\b(iteration|instance|GPU)s\b", r"\1", line)
    return " ".join(line.split())


def compile_both(reader: Reader, block: Block) -> None:
    """A program before and after it is moved; the page runs both, and says how many lines go and come."""
    assert block.title is not None, f"{block}: a change without names"
    for name in block.title.split(" -> "):
        compile((reader.folder / name).read_text(encoding="utf-8"), name, "exec")
    gone, new = (sum(line.startswith(sign) for line in block.text.splitlines()) for sign in "-+")
    found = block.page.read_text(encoding="utf-8")
    assert re.search(rf"\b{gone}\b(?: lines)?(?: of them)?[^.]*\b{new}\b", found), (
        f"{block}: {gone} lines go and {new} come"
    )


def agree_with_the_example(block: Block) -> None:
    """The entry points of the example of a provider."""
    example = tomllib.loads((ROOT / "examples/provider/pyproject.toml").read_text(encoding="utf-8"))
    assert tomllib.loads(block.text)["project"]["entry-points"] == example["project"]["entry-points"], f"{block}"


LANGUAGES: Mapping[str, Callable[[Reader, Block], None]] = {
    "console": run,
    "sh": run,
    "python": run,
    "yaml": read_yaml,
    "json": read_json,
    "diff": compile_both,
    "toml": lambda reader, block: agree_with_the_example(block),
    "ini": read_unit,
    "nginx": lambda reader, block: None,  # tests/integration/test_deploy.py compares it with the file, as the next
    "docker": lambda reader, block: None,
    "text": look_at_text,
}


def test_the_figure_shows_what_a_report_says(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.run(_commands(SET_UP[0], "rubberband run examples/scaling.yaml -s resources.provider=virtual"))
    reader.run(_commands(SET_UP[0], "rubberband report scaling -o json > report.json"))
    figure = ElementTree.fromstring(reader.shell(f"python {ROOT}/docs/figure.py < report.json"))
    words = [element.text for element in figure.findall(".//{*}text")]
    assert [word for word in words if word and re.match(r"\d+ x", word)] == [
        "16 x 1",
        "8 x 2",
        "4 x 2",
        "2 x 4",
        "1 x 8",
    ]
    assert words.count("released") == 2
    assert words.count("SYNC") == 4


TRIALS = ROOT / "docs/write-a-trial.md"
CLASSES = {
    block.title: re.findall(r"^class (\w+)\(.*Trial\):", block.text, re.MULTILINE)
    for block in ALL
    if block.page == TRIALS and block.title is not None
}


@pytest.mark.long
@pytest.mark.parametrize("title", [title for title, classes in CLASSES.items() if classes])
def test_the_trials_of_the_page_on_trials_pass_their_check(title: str, tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for block in blocks(TRIALS):
        if block.title is not None:
            reader.save(block)
    module = title.removesuffix(".py")
    reader.shell(f"rubberband init {module}:{CLASSES[title][-1]} --file its.yaml && rubberband check its.yaml")


FROM_TORCH = {"CUDA out of memory"}


def test_the_messages_of_troubleshooting_are_ours() -> None:
    source = " ".join(
        re.sub(r'["\']\s*\n\s*f?["\']', "", path.read_text(encoding="utf-8"))
        for folder in ("rubberband", "planner", "executor", "cloud", "api")
        for path in (ROOT / folder).rglob("*.py")
    )
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    for heading in {*re.findall(r"^### `(.*)`$", page, re.MULTILINE)} - FROM_TORCH:
        longest = max(heading.removeprefix("error: ").split("…"), key=len).strip()
        assert longest in source, f"no message has {longest!r}: {heading}"


def test_all_messages_are_listed_with_their_fixes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs", reason="the pages are made by MkDocs; pip install -e '.[docs]'")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    listed = list(importlib.import_module("reference").messages())
    rows = [line for line in listed if line.startswith("| ") and line != "| message | fix |"]
    assert len(rows) > 800
    assert sum(line.endswith("|  |") for line in rows) < len(rows) / 4, "most messages have a fix"
    text = re.sub(r"\\\\(.)", r"\\1", " ".join(listed))
    for words in (
        "is taken by another experiment",
        "has no profile",
        "not YAML",
        "no module",
        "does not end with a format",
        "listens on every address",
        "there are no AWS credentials",
        "is not a duration",
        "occurs twice",
    ):
        assert words in text, f"no message has {words!r}"


def test_the_states_of_an_experiment_are_all_reported() -> None:
    page = (ROOT / "docs/concepts.md").read_text(encoding="utf-8")
    found = re.findall(r"^\| `(\w+)` \|", page.partition("## States")[2], re.MULTILINE)
    assert found == list(ExperimentState)


@cases("expected", "printed", "same")
def test_output_is_compared_line_by_line(expected: str, printed: str, same: bool) -> None:
    assert agrees(expected, printed) is same


def test_files_that_contributing_names_are_there() -> None:
    named = re.findall(
        r"`((?:rubberband|planner|executor|cloud|api|tests)/[\w/]+\.py)`", (ROOT / "CONTRIBUTING.md").read_text()
    )
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_quick_start_names_all_extras() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    page = (ROOT / "docs/quick-start.md").read_text(encoding="utf-8")
    assert [extra for extra in found if extra not in ("docs", "test") and f"`{extra}`" not in page] == []


EXPERIMENTS = [path for path in kept_files(ROOT / "examples", "*.yaml") if path.parent.name != "deploy"]


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_example_file_is_estimated_as_it_stands(path: Path, tmp_path: Path) -> None:
    printed = Reader(tmp_path).run(_commands(SET_UP[0], f"rubberband estimate {path.relative_to(ROOT)}\n..."))
    assert "within the deadline" in printed, "on a fresh home, without an account or a measurement"


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_example_file_is_rehearsed_on_the_virtual_clock(path: Path, tmp_path: Path) -> None:
    cpus = "-s resources.instance_type=c7i.2xlarge " * (path.stem == "fits")
    words = f"rubberband run {path.relative_to(ROOT)} -s resources.provider=virtual {cpus}"
    printed = Reader(tmp_path).run(_commands(SET_UP[0], f"{words}\n..."))
    assert ": done in " in printed


@pytest.mark.parametrize("page", ["docs/examples/index.md", "examples/README.md"])
def test_every_example_is_listed(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    files = {path.relative_to(ROOT / "examples").parts[0] for path in kept_files(ROOT / "examples")} - {"README.md"}
    lacking = {name for name in files if f"`{name}" not in text and f"`{Path(name).stem}." not in text}
    assert lacking == set(), "add a row"


def test_the_commands_in_the_comments_of_the_examples(tmp_path: Path) -> None:
    """Each names a command and a file that exist; runs are estimated, and scripts know their options."""
    reader, seen = Reader(tmp_path), 0
    known: Any = typer.main.get_command(app)
    for path in sorted((ROOT / "examples").glob("*.*")):
        if path.suffix not in (".py", ".yaml"):
            continue
        for found in re.findall(r"\b(?:rubberband|python) [^\n`;]+", path.read_text(encoding="utf-8")):
            words = shlex.split(found, comments=True)
            if words[0] == "python" and words[1].startswith("examples/"):
                script = (ROOT / words[1]).read_text(encoding="utf-8")
                assert all(f'"{word}"' in script for word in words if word.startswith("--")), found
            elif words[0] == "rubberband" and words[1] in known.commands:
                if len(words) > 2 and words[2].startswith("examples/"):
                    asked = [word for word in words[2:] if word not in ("--on", "head", "--live")]
                    reader.run(_commands(SET_UP[0], f"{shlex.join(['rubberband', 'estimate', *asked])}\n..."))
            else:
                continue
            seen += 1
    assert seen >= 10


def test_the_experiment_of_the_page_on_pools_runs_on_its_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rubberband.cloud.pool.RemotePool.ensure_broker", lambda pool: None)
    page = blocks(ROOT / "docs/pool.md")
    reader = Reader(tmp_path)
    reader.save(next(block for block in page if block.title == "team.yaml"))
    (found,) = [block for block in page if "rubberband run" in block.text]
    up, run, *_ = [command.words for command in commands(found.text)]
    reader.run(_commands(found, f"{up}\n..."))
    reader.run(_commands(found, f"{run.replace('rubberband run', 'rubberband estimate')}\n..."))


# README's file is the example's, and its Python says the same


def code_of_readme(language: str) -> list[str]:
    return [block.text for block in ALL if block.page == README and block.language == language]


def without_place(experiment: Experiment) -> dict[str, Any]:
    """The experiment without its name and its entry point."""
    words = experiment.to_words()
    return {key: words[key] for key in words if key not in ("name", "entrypoint")}


def test_the_file_is_the_example() -> None:
    (text,) = code_of_readme("yaml")
    assert without_place(parse_experiment(text)) == without_place(load_experiment(ROOT / "examples" / "digits.yaml"))


def test_the_python_form_says_the_same(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Experiment] = []

    class Answer:
        best_config: Any = None
        actual_cost_usd = 0.0

    def tune(entrypoint: Any, **words: Any) -> Answer:
        seen.append(Experiment(entrypoint=entrypoint, **words))
        return Answer()

    monkeypatch.setattr(rubberband, "tune", tune, raising=False)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setitem(sys.modules, "examples", type(sys)("examples"))
    sys.modules["examples"].__path__ = [str(ROOT / "examples")]
    exec(code_of_readme("python")[0], {})
    assert [without_place(e) for e in seen] == [without_place(load_experiment(ROOT / "examples" / "digits.yaml"))]
    assert seen[0].entrypoint.__name__ == "DigitsTrial"
