"""Reference pages that are made from the program when the site is built: commands, experiment file, REST.

A hook of MkDocs (see mkdocs.yml). The Python reference is made by mkdocstrings.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.cli import get_docs_for_click

from rubberband.api.app import document
from rubberband.cli import Promised, app
from rubberband.features import FEATURES

ROOT = Path(__file__).parents[1]
ROLES, ROLES_SOURCE = "ec2-roles.md", "../cloud/aws/policies/README.md"
Schema = Mapping[str, Any]
SCHEMA: Schema = json.loads((ROOT / "rubberband/experiment.schema.json").read_text(encoding="utf-8"))
FILE: Schema = SCHEMA["$defs"]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to those of the folder."""
    pages = {
        "cli": commands(),
        "experiment-file": experiment_file(SCHEMA),
        "rest": rest(json.loads(json.dumps(document(), sort_keys=True))),
        "messages": messages(),
    }
    for name, lines in pages.items():
        content = "\n".join(["---", "search: {boost: 0.5}", "---", *lines])  # guides come first
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    files.append(File.generated(config, ROLES, content=(ROOT / "docs" / ROLES_SOURCE).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Redirect links to the README of the roles, which is beside the policies, to its page; fill in the features."""
    return markdown.replace(f"({ROLES_SOURCE})", f"({ROLES})").replace("<!-- features -->", "\n".join(features()))


def features() -> Iterator[str]:
    """Generate the table of features."""
    yield "| feature | words of the file | commands | below `rubberband` |\n|---|---|---|---|"
    for feature in FEATURES:
        cells = (", ".join(map("`{}`".format, names)) for names in (feature.words, feature.commands, feature.modules))
        yield f"| [{feature.name}]({feature.page}) | {' | '.join(cells)} |"


def commands() -> Iterator[str]:
    """Generate the page of the commands, from their help."""
    yield "# Commands\n"
    yield "Print the help of a command with `rubberband COMMAND --help`.\n"
    group: Any = typer.main.get_command(app)
    yield "| command | |\n|---|---|"
    for name, promised in group.commands.items():
        yield f"| [`{name}`](#rubberband-{name}) | {promised.get_short_help_str(200)} |"
    yield ""
    for name, promised in group.commands.items():
        command = promised.made() if isinstance(promised, Promised) else promised
        context = command.context_class(command, info_name=name)
        written = get_docs_for_click(obj=command, ctx=context, name=name, call_prefix="rubberband", indent=1)
        yield re.sub(r"\x08\nExamples:\n((?:  .*\n)+)", _examples, written)
    yield "## Exit codes\n"
    yield "| code | meaning |\n|---:|---|"
    yield "| 0 | done |\n| 1 | failed |\n| 2 | wrong usage or input; nothing was started |\n| 3 | no plan is feasible |"
    yield "| 4 | finished after the deadline |\n| 130 | ended by Ctrl-C, SIGTERM, SIGHUP or `rubberband cancel` |\n"
    yield "## Environment variables\n"
    yield "| name | meaning |\n|---|---|"
    yield "| `RUBBERBAND_HOME` | where experiments are kept; `~/.rubberband` by default |"
    yield "| `RUBBERBAND_SERVER` | the service that commands ask; `local` for none |"
    yield "| `RUBBERBAND_TOKEN` | the token for that service |"
    yield "| `RUBBERBAND_STORE` | the database of the service and of the journals |"
    yield "| `RUBBERBAND_CATALOGUE` | a file that replaces the catalogue of instance types |"


def experiment_file(schema: Schema) -> Iterator[str]:
    """Generate the page of the experiment file, with a table for each object of its schema."""
    yield "# Experiment file\n"
    yield "Every key of the file, and of the same words in Python. An unknown key is an error.\n"
    yield "This page is made from `rubberband/experiment.schema.json`. Editors with a YAML language server check a file"
    yield "whose first line names the schema, as the one that `rubberband init` writes does.\n"
    yield f"```yaml\n{whole_file()}```\n"
    yield "## The file\n"
    yield from _table(schema)
    for name in _mentioned(schema, schema["$defs"]):
        yield from _definition(name, schema["$defs"][name], title=TITLES[name])


def whole_file() -> str:
    """Return an experiment file with most keys, and with their meanings as comments."""
    lines, above = [], list[tuple[int, str]]()
    for line in (ROOT / "docs/whole.yaml").read_text(encoding="utf-8").splitlines():
        indent, key = len(line) - len(line.lstrip()), line.strip().partition(":")[0]
        above = [each for each in above if each[0] < indent]
        about = _described([*(name for _, name in above), key])
        above.append((indent, key))
        short = re.split(r"[.;] |(?<= \w\w\w): |\.$", " ".join(about.split()))[0].replace("`", "")
        lines.append(f"{line}  # {short}" if 0 < len(short) < 100 - len(line) else line)
    return "\n".join(lines) + "\n"


def _described(path: list[str]) -> str:
    """Return the description of a key; empty for one that has none."""
    found: Schema = SCHEMA
    for key in path:
        parts = [found, *(found.get("anyOf") or found.get("oneOf") or ())]
        inner = [FILE[part["$ref"].rpartition("/")[2]] if "$ref" in part else part for part in parts]
        found = next((each["properties"][key] for each in inner if key in each.get("properties", ())), {})
    own = FILE[found["$ref"].rpartition("/")[2]] if "$ref" in found else {}
    return str(found.get("description") or own.get("description", ""))


def _titles() -> Mapping[str, str]:
    """Return the name of each object of the file -> where it is written, such as resources.gpus_per_trial."""
    found = dict[str, str]()

    def walk(schema: Schema, path: str) -> None:
        for key, value in schema.get("properties", {}).items():
            below = f"{path}.{key}" if path else key
            for name in dict.fromkeys(re.findall(r"#/\$defs/(\w+)", json.dumps(value))):
                kind = FILE[name].get("properties", {}).get("type", {}).get("const")
                if name not in found:
                    found[name] = f"{below}, type: {kind}" if kind else below
                    walk(FILE[name], below)

    walk(SCHEMA, "")
    twice = {title for title in found.values() if list(found.values()).count(title) > 1}
    return {name: f"{title}: {_in_words(name)}" if title in twice else title for name, title in found.items()}


def _in_words(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name.removesuffix("Words")).lower()


TITLES = _titles()
"""Object of the file -> the title of its section."""


_PARTS = {
    "Experiment and pool files": ("rubberband/spec", "rubberband/values", "rubberband"),
    "Commands": ("rubberband/commands", "rubberband/running", "rubberband/views"),
    "Plans": ("rubberband/planning", "planner"),
    "Trials": ("executor/training", "rubberband/integrations"),
    "Runs": ("executor",),
    "EC2, local instances and clusters": ("cloud",),
    "Service": ("api", "rubberband/client"),
}
"""Section of the messages -> the folders whose errors it has. The longest folder that a file is in counts."""


def messages() -> Iterator[str]:
    """Generate the page of all messages, from the errors that the source raises."""
    yield "# Messages\n"
    yield "The errors that RubberBand raises, each with its fix; made from the program. Search the page for words"
    yield "of your message. `…` stands for your own values. [Troubleshooting](../troubleshooting.md) explains some.\n"
    found: dict[str, dict[str, None]] = {part: {} for part in _PARTS}
    homes = {folder: part for part, folders in _PARTS.items() for folder in folders}
    for folder in ("rubberband", "planner", "executor", "cloud", "api"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            where = path.relative_to(ROOT).as_posix()
            home = max((each for each in homes if where.startswith(f"{each}/")), key=len)
            if not where.startswith(tuple(f"rubberband/{link}/" for link in ("planner", "executor", "cloud", "api"))):
                found[homes[home]] |= dict.fromkeys(_raised(path))
    for part, texts in found.items():
        yield f"## {part}\n"
        yield "| message | fix |\n|---|---|"
        for text in sorted(texts, key=lambda text: text.strip("… :`").lower()):
            wrong, _, fix = text.partition("; ")
            yield f"| {_plain(wrong)} | {_plain(fix)} |"
        yield ""


def _raised(path: Path) -> Iterator[str]:
    """Iterate over the texts of the errors that a module raises; what is put into them is `…`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            given = [*node.exc.args, *(each.value for each in node.exc.keywords)]
            texts = [max(map(_template, given), key=len, default="")]
            for call in given:
                if isinstance(call, ast.Call) and (made := functions.get(getattr(call.func, "attr", _id(call.func)))):
                    inner = (each.value for each in ast.walk(made) if isinstance(each, ast.Return) and each.value)
                    texts += map(_template, inner)
            yield from (" ".join(text.split()) for text in texts if len(re.findall(r"[A-Za-z]{2,}", text)) > 1)


def _id(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _template(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_template(part) or "…" for part in parts)
        case ast.BinOp(left=left, right=right):
            return f"{_template(left)}{_template(right)}"
    return ""


def _plain(text: str) -> str:
    """Return a text whose characters are no Markdown."""
    return re.sub(r"([\\`*_{}\[\]<>#|$])", r"\\\1", text)


def _examples(found: re.Match[str]) -> str:
    """Return the examples of a command's help as a block that can be copied."""
    lines = "".join(f"$ {line.strip()}\n" for line in found[1].splitlines())
    return f"**Examples**:\n\n```console\n{lines}```\n"


def _mentioned(schema: Schema, definitions: Schema) -> list[str]:
    """Return the names of all definitions, in order of their appearance."""
    found = list(dict.fromkeys(re.findall(r"#/\$defs/(\w+)", json.dumps({**schema, "$defs": None}))))
    for name in found:
        inner = re.findall(r"#/\$defs/(\w+)", json.dumps(definitions[name]))
        found += [each for each in dict.fromkeys(inner) if each not in found]
    return found


def rest(api: Schema) -> Iterator[str]:
    """Generate the page of the REST interface: requests by tag, then the objects."""
    yield "# REST\n"
    yield f"{api['info']['description']}\n"
    yield "A running service has this description as OpenAPI 3.1 at `/openapi.json`.\n"
    operations = [(path, *each) for path, methods in api["paths"].items() for each in methods.items()]
    for tag in dict.fromkeys(operation["tags"][0] for _, _, operation in operations):
        yield f"## {tag.capitalize()}\n"
        for path, method, operation in operations:
            if operation["tags"][0] == tag:
                yield f"### {method.upper()} {path.removeprefix('/v1')}\n"
                yield f"**{operation['summary']}.** {operation.get('description', '')}\n"
                yield f"```http\n{method.upper()} {path}\n```\n"
                yield from _request(operation)
                yield from _responses(operation)
    yield "## Objects\n"
    yield "The objects of an experiment are those of the [experiment file](experiment-file.md).\n"
    for name, definition in api["components"]["schemas"].items():
        if name not in FILE:
            yield from _definition(name, definition, level=3)


def _request(operation: Schema) -> Iterator[str]:
    parameters = [each for each in operation.get("parameters", []) if "$ref" not in each]
    if parameters:
        yield "| parameter | in | type | meaning |\n|---|---|---|---|"
        for each in parameters:
            yield f"| `{each['name']}` | {each['in']} | {_type(each['schema'])} | {_words(each)} |"
        yield ""
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        yield f"Body: `{kind}`, {_type(body['schema'])}\n"


def _responses(operation: Schema) -> Iterator[str]:
    problems = []
    for status, response in operation["responses"].items():
        text = response.get("description") or response.get("$ref", "").rpartition("/")[2]
        if status < "300":
            kinds = [f"`{kind}`, {_type(body['schema'])}" for kind, body in response.get("content", {}).items()]
            yield f"* **{status}**: {_cell(text)} {'; '.join(kinds)}"
        else:
            problems.append(f"{status} {text.strip('.')}")
    yield f"* Problems: {', '.join(problems)}\n"


def _definition(name: str, definition: Schema, level: int = 2, title: str = "") -> Iterator[str]:
    yield f"{'#' * level} {f'{title} {{#{name.lower()}}}' if title else name}\n"
    yield f"{definition.get('description', '')}\n"
    if "enum" in definition:
        yield f"{_type(definition)}\n"
    if definition.get("properties"):
        yield from _table(definition)


def _table(definition: Schema) -> Iterator[str]:
    has_examples = any("examples" in value for value in definition["properties"].values())
    yield (
        "| key | type | example | meaning |\n|---|---|---|---|"
        if has_examples
        else "| key | type | meaning |\n|---|---|---|"
    )
    for key, value in definition["properties"].items():
        ending = "**Required.**" if key in definition.get("required", ()) else _default(value)
        example = f"{_example(value)} | " if has_examples else ""
        yield f"| `{key}` | {_type(value)} | {example}{_words(value)} {ending} |"
    yield ""


def _example(value: Schema) -> str:
    """Return the example of a key as YAML on one line; empty without one."""
    if "examples" not in value:
        return ""
    text = yaml.safe_dump(value["examples"][0], default_flow_style=True, width=10_000, sort_keys=False)
    written = re.sub(r"'(\d+)':", r"\1:", text.removesuffix("...\n"))
    return f"`{_cell(written)}`"


def _default(value: Schema) -> str:
    default = value.get("default")
    return f"Default: `{json.dumps(default)}`." if default or default in (0, False) else ""


def _words(value: Schema) -> str:
    return _cell(value.get("description") or value.get("schema", {}).get("description", ""))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _type(value: Schema) -> str:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        page = "experiment-file.md" if name in FILE and "/components/" in value["$ref"] else ""
        text = TITLES.get(name, name) if "/$defs/" in value["$ref"] else name
        return f"[{text}]({page}#{name.lower()})"
    if "const" in value:
        return f"`{json.dumps(value['const'])}`"
    if "enum" in value:
        return ", ".join(f"`{one}`" for one in value["enum"])
    for choice in ("anyOf", "oneOf", "allOf"):
        if choice in value:
            return " or ".join(dict.fromkeys(_type(one) for one in value[choice] if one.get("type") != "null"))
    kind = value.get("type", "anything")
    if kind == "array":
        return f"list of {_type(value.get('items', {}))}"
    if kind == "object" and isinstance(value.get("additionalProperties"), Mapping):
        return f"mapping to {_type(value['additionalProperties'])}"
    return f"{kind}{_bounds(value)}"


def _bounds(value: Schema) -> str:
    words = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {value[key]:g}" for key, sign in words.items() if key in value and abs(value[key]) < 1e8]
    return f" {', '.join(bounds)}" if bounds else ""
