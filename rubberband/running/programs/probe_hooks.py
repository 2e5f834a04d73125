"""Reads the options of programs whose parser is not argparse's, for `parser_probe`, which loads this file by its path.

A library is patched as a program imports it. Only the standard library is imported here, as in `parser_probe`.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable
from typing import Any

_LAST = 99
"""Level of options that stand behind all subcommands."""
probe: Any = None
"""The module `parser_probe`, as it runs."""


def install(running: Any) -> None:
    """Patch each library that a program imports from now on."""
    global probe
    probe = running
    sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds the libraries below, and patches each after its import."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's own specification, whose loader patches the module; None for others."""
        patch = PATCHES.get(name)
        if patch is None:
            return None
        others = (each.find_spec(name, path, target) for each in sys.meta_path if each is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                patch(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _plain(value: Any) -> Any:
    """Return a default as JSON has it; None for objects, and for what says that there is none."""
    value = getattr(value, "value", value)  # of an Enum
    return value if isinstance(value, (bool, int, float, str)) else None


def _typed(hint: Any) -> tuple[str | None, list[Any] | None]:
    """Return the name of a type, and its choices: of `Optional[int]`, `Literal[…]` and an Enum too."""
    if isinstance(hint, str):
        hint = hint.replace("Optional[", "").replace("]", "").replace("None", "").strip(" |")
        return (hint if hint in ("int", "float", "bool", "str") else None), None
    inner = [each for each in getattr(hint, "__args__", ()) if each is not type(None)]
    if "Literal" in str(getattr(hint, "__origin__", "")):
        return "str", list(inner)
    if isinstance(hint, type) and hasattr(hint, "__members__"):
        return "str", list(hint.__members__)
    if len(inner) == 1 and ("Union" in str(hint) or "Optional" in str(hint) or "|" in str(hint)):
        return _typed(inner[0])
    if inner:  # int | float, or a path that may be a str
        return next((each.__name__ for each in (str, float, int) if each in inner), None), None
    return (hint.__name__ if hint in (int, float, bool, str) else None), None


def _value(name: str, default: Any, hint: Any = None, **more: Any) -> dict[str, Any]:
    """Return an option with a value, as `--name=value`."""
    kind, choices = _typed(hint)
    plain = _plain(default)
    if kind is None and plain is not None:
        kind = type(plain).__name__
    found = {
        "name": name.replace("-", "_"),
        "flags": ["--" + name],
        "form": "=",
        "type": kind,
        "default": plain,
        "choices": choices,
        "booleans": ["True/False"] if kind == "bool" else None,
    }
    found.update(more)
    return found


# click, and typer, which has a copy of it.


def _click(module: Any) -> None:
    for owner in {module.Command, vars(module).get("BaseCommand", module.Command)}:
        if "make_context" not in vars(owner):
            continue

        def make_context(
            self: Any, name: Any, args: Any, parent: Any = None, *, made: Any = owner.make_context, **more: Any
        ) -> Any:
            if parent is None:
                probe.stop(*_of_command(module, self, list(args), 0))
            return made(self, name, args, parent, **more)

        owner.make_context = make_context


def _of_command(module: Any, command: Any, words: list[str], level: int) -> tuple[list[dict[str, Any]], list[str]]:
    context = module.Context(command)
    found = [dict(option, level=level) for each in command.params for option in _of_parameter(each)]
    if not hasattr(command, "list_commands"):
        return found, []
    names = list(command.list_commands(context))
    name = probe.chosen(words, names)
    if name is None:
        return ([] if command.invoke_without_command else [probe.one_of(names)]) + found, []
    options, commands = _of_command(module, command.get_command(context, name), words, level + 1)
    return found + options, [name, *commands]


_OF_CLICK = {"integer": "int", "integer range": "int", "float": "float", "float range": "float", "boolean": "bool"}


def _of_parameter(each: Any) -> list[dict[str, Any]]:
    if not getattr(each, "expose_value", True) or getattr(each, "is_eager", False):
        return []
    if hasattr(each, "type"):
        kind = _OF_CLICK.get(each.type.name, "str")
        choices = [getattr(choice, "value", choice) for choice in getattr(each.type, "choices", ())] or None
    else:  # typer since 0.29
        hint = each.type_descriptor.annotation
        kind, choices = _typed(hint)[0] or "str", _typed(hint)[1]
        choices = [member.value for member in hint] if hasattr(hint, "__members__") else choices
    option = _value(
        each.name,
        None if callable(each.default) else each.default,
        flags=[] if each.param_type_name == "argument" else list(each.opts),
        form="space",
        type=kind,
        choices=choices,
        takes_one=each.nargs == 1 and not getattr(each, "multiple", False),
        required=bool(each.required or (getattr(each, "prompt", None) and _plain(each.default) is None)),
        booleans=["true/false", "True/False", "1/0"] if kind == "bool" else None,
        help=getattr(each, "help", None) or "",
    )
    if getattr(each, "is_flag", False):
        is_pair = bool(each.secondary_opts)
        option.update(kind="pair" if is_pair else "switch", off=max(each.secondary_opts, key=len) if is_pair else "")
        option.update(flags=option["flags"] + list(each.secondary_opts))
    if getattr(each, "count", False):
        option.update(kind="other")
    return [option]


# Fire.


def _fire(module: Any) -> None:
    def fire(component: Any = None, command: Any = None, **_: Any) -> None:
        if component is None:
            names = sys._getframe(1).f_globals
            component = {name: each for name, each in names.items() if inspect.isfunction(each) and name[0] != "_"}
        probe.stop(*_of_component(component, sys.argv[1:]))

    module.Fire = fire


def _of_component(component: Any, words: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the options of a function, or of a class and the method that the words name."""
    if inspect.isroutine(component):
        return _of_signature(component), []
    found = _of_signature(component) if inspect.isclass(component) else []
    is_table = isinstance(component, dict)
    members = component if is_table else dict(inspect.getmembers(component, inspect.isroutine))
    names = [name for name in members if not name.startswith("_")]
    name = probe.chosen(words, names)
    if name is None:
        return [probe.one_of(names), *found], []
    options, commands = _of_component(members[name], words)
    known = {option["name"] for option in found}
    return found + [option for option in options if option["name"] not in known], [name, *commands]


def _of_signature(function: Any) -> list[dict[str, Any]]:
    found = []
    for name, each in inspect.signature(function).parameters.items():
        if name == "self" or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD, each.POSITIONAL_ONLY):
            continue
        is_required = each.default is each.empty
        hint = None if each.annotation is each.empty else each.annotation
        flags = ["--" + name, "--" + name.replace("_", "-")] if "_" in name else ["--" + name]
        default = None if is_required else each.default
        found.append(_value(name, default, hint, flags=flags, required=is_required, level=_LAST))
    return found


# absl.


def _absl(module: Any) -> None:
    parse = module.FlagValues.__call__

    def call(self: Any, argv: Any, known_only: bool = False) -> None:
        found = []
        with contextlib.suppress(BaseException):  # files of configurations are read then
            parse(self, argv, known_only)
        for name, flags in self.flags_by_module_dict().items():
            file = getattr(sys.modules.get(name), "__file__", None) or ""
            if not name.startswith("absl.") and "site-packages" not in file:
                found += [_of_flag(flag) for flag in flags]
        for name, flag in self._flags().items():
            if hasattr(flag.value, "to_dict"):  # of ml_collections
                found += [_value(name + "." + inner, value) for inner, value in _flat(flag.value.to_dict()).items()]
        probe.stop(found)

    module.FlagValues.__call__ = call


def _of_flag(flag: Any) -> dict[str, Any]:
    kind = "bool" if flag.boolean else flag.flag_type()
    values = list(getattr(flag.parser, "enum_values", None) or ()) or None
    option = _value(
        flag.name,
        flag.default,
        type=kind if kind in ("int", "float", "bool") else "str",
        choices=values,
        takes_one=not isinstance(flag.default, (list, tuple)) and not kind.startswith("multi"),
        required=any("other than None" in (each.message or "") for each in flag.validators),
        help=flag.help or "",
        booleans=None,
    )
    if flag.boolean:
        option.update(kind="pair", off="--no" + flag.name, flags=["--" + flag.name, "--no" + flag.name])
    return option


# optparse.


def _optparse(module: Any) -> None:
    def parse_args(self: Any, args: Any = None, values: Any = None) -> None:
        options = [option for group in [self, *self.option_groups] for option in group.option_list]
        kinds = {"store": "value", "store_true": "switch"}
        probe.stop(
            [
                _value(
                    each.dest,
                    self.defaults.get(each.dest),
                    flags=each._short_opts + each._long_opts,
                    form="space",
                    kind=kinds.get(each.action, "other"),
                    type=each.type,
                    choices=each.choices,
                    takes_one=each.nargs in (None, 1),
                    help=each.help or "",
                    booleans=None,
                )
                for each in options
                if each.dest
            ]
        )

    module.OptionParser.parse_args = parse_args


# jsonargparse, and LightningCLI.


def _jsonargparse(module: Any) -> None:
    parse = module.ArgumentParser.parse_args

    def parse_args(self: Any, args: Any = None, *more: Any, **named: Any) -> None:
        module.ArgumentParser.parse_args = parse  # which asks others
        options, commands = probe.options_of(self, 0, _of_hint)
        values: dict[str, Any] = {}
        with contextlib.suppress(BaseException):  # something required is missing: the defaults of the parsers stand
            values = _flat(self.parse_args(list(sys.argv[1:] if args is None else args), *more, **named).as_dict())
        before = "".join(command + "." for command in commands)
        names = {option["name"] for option in options}
        for option in options:
            option["default"] = values.get(before + option["name"], option["default"])
        for name, value in values.items():  # of classes that a configuration file names
            inner = name[len(before) :]
            if name.startswith(before) and ".init_args." in inner and inner not in names:
                options.append(_value(inner, value, booleans=["true/false"], level=len(commands)))
        probe.stop(options, commands)

    module.ArgumentParser.parse_args = parse_args


def _of_hint(action: Any, parser: Any) -> dict[str, Any]:
    hint = getattr(action, "_typehint", None) or action.type
    option: dict[str, Any] = probe.option_of(action, parser)
    kind, choices = _typed(hint)
    option.update(type=kind, default=_plain(parser.get_defaults().get(action.dest)), form="=", takes_one=True)
    option.update(required=action.dest in getattr(parser, "required_args", ()))
    option.update(kind="value" if action.option_strings and kind else "other")
    if kind == "bool":
        option.update(booleans=["true/false", "True/False"], choices=None)
    elif choices:
        option.update(choices=choices)
    return option


# tyro.


def _tyro(module: Any) -> None:
    make = module._parsers.ParserSpecification.from_callable_or_type
    depth = [0]

    def from_callable_or_type(*args: Any, **named: Any) -> Any:
        depth[0] += 1
        try:
            made = make(*args, **named)
        finally:
            depth[0] -= 1
        if not depth[0]:
            probe.stop(*_of_specification(made, 0))
        return made

    module._parsers.ParserSpecification.from_callable_or_type = staticmethod(from_callable_or_type)


def _of_specification(made: Any, level: int) -> tuple[list[dict[str, Any]], list[str]]:
    found: list[dict[str, Any]] = []
    commands: list[str] = []
    for each in made.args:
        lowered, field = each.lowered, each.field
        if lowered.is_fixed():
            continue
        is_positional = each.is_positional()
        name = lowered.name_or_flags[-1].lstrip("-")
        option = _value(
            name,
            field.default,
            field.type_stripped,
            flags=[] if is_positional else list(lowered.name_or_flags),
            form="space",
            takes_one=lowered.nargs in (None, 1, "?"),
            required=bool(lowered.required),
            level=level,
        )
        if lowered.choices:
            option.update(choices=list(lowered.choices), booleans=None)
        if lowered.action == "boolean_optional_action":
            before, _, last = name.rpartition(".")
            off = "--" + (before + "." if before else "") + "no-" + last
            option.update(kind="pair", off=off, flags=[*option["flags"], off])
        elif lowered.action is not None:
            option.update(kind="switch" if lowered.action == "store_true" else "other")
        found.append(option)
    for child in made.child_from_prefix.values():
        options, inner = _of_specification(child, level)
        found, commands = found + options, commands + inner
    for parsers in made.subparsers_from_intern_prefix.values():
        names = list(parsers.parser_from_name)
        chosen = probe.chosen(sys.argv[1:], names) or parsers.default_name
        if chosen is None:
            found.append(probe.one_of(names))
        elif chosen in sys.argv or parsers.required:
            options, inner = _of_specification(parsers.parser_from_name[chosen].evaluate(), level + 1)
            found, commands = found + options, [*commands, chosen, *inner]
    return found, commands


# hydra and OmegaConf.


def _hydra(module: Any) -> None:
    def run(self: Any, config_name: Any, task_function: Any, overrides: Any, *_: Any, **__: Any) -> None:
        mode = module.RunMode.RUN
        config = self.compose_config(config_name=config_name, overrides=overrides, run_mode=mode)
        groups = dict(config.hydra.runtime.choices)
        found = _of_config(config)
        for name, value in groups.items():
            options = [] if name.startswith("hydra") or value is None else self.config_loader.get_group_options(name)
            if len(options) > 1:
                found.append(_value(name, value, flags=[name], choices=list(options)))
        found.append(_value("hydra.run.dir", None, flags=["hydra.run.dir"], type="str"))
        probe.stop(found)

    module.Hydra.run = module.Hydra.multirun = run


def _compose(module: Any) -> None:
    def compose(*_: Any, **__: Any) -> None:
        probe.stop([], fault="it calls hydra.compose, which reads no command line: let @hydra.main compose it")

    module.compose = compose


def _of_config(config: Any) -> list[dict[str, Any]]:
    omegaconf = sys.modules["omegaconf"]
    content = omegaconf.OmegaConf.to_container(config, resolve=False)
    found = []
    for name, value in _flat(content).items():
        if name.split(".")[0] == "hydra" or (isinstance(value, str) and "${" in value) or name.endswith("_target_"):
            continue
        is_missing = value == "???"
        words = ["True/False", "true/false"] if isinstance(value, bool) else None
        found.append(_value(name, None if is_missing else value, flags=[name], required=is_missing, booleans=words))
    return found


def _flat(content: Any, before: str = "") -> dict[str, Any]:
    """Return nested values by their names with dots."""
    found: dict[str, Any] = {}
    for name, value in content.items() if isinstance(content, dict) else ():
        if isinstance(value, dict):
            found.update(_flat(value, before + str(name) + "."))
        elif value is None or isinstance(value, (bool, int, float, str)):
            found[before + str(name)] = value
    return found


def _omegaconf(module: Any) -> None:
    """Stop where the words, as a configuration, are merged into another one."""
    owner, base = module.OmegaConf, module.BaseContainer
    words: list[Any] = []
    read, joined, join_words = owner.from_cli, base.merge_with, base.merge_with_dotlist

    def from_cli(*args: Any) -> Any:
        base.merge_with_dotlist = join_words  # by which it makes a configuration of the words
        words.append(read(*args))
        base.merge_with_dotlist = merge_with_words
        return words[-1]

    def merging(merge: Callable[..., Any]) -> Any:
        def merged(*configs: Any) -> Any:
            made = merge(*configs)
            if any(config is each for config in configs for each in words) and len(configs) > 1:
                probe.stop(_of_config(made))
            return made

        return staticmethod(merged)

    owner.from_cli = staticmethod(from_cli)
    owner.merge, owner.unsafe_merge = merging(owner.merge), merging(owner.unsafe_merge)

    def merge_with(self: Any, *configs: Any) -> None:
        joined(self, *configs)
        if any(config is each for config in configs for each in words):
            probe.stop(_of_config(self))

    def merge_with_words(self: Any, dotlist: Any = None) -> None:
        probe.stop(_of_config(self))

    base.merge_with, base.merge_with_cli, base.merge_with_dotlist = merge_with, merge_with_words, merge_with_words


PATCHES: dict[str, Callable[[Any], None]] = {
    "absl.flags._flagvalues": _absl,
    "click.core": _click,
    "fire.core": _fire,
    "hydra._internal.hydra": _hydra,
    "hydra.compose": _compose,
    "jsonargparse._core": _jsonargparse,
    "jsonargparse.core": _jsonargparse,
    "omegaconf.omegaconf": _omegaconf,
    "optparse": _optparse,
    "typer._click.core": _click,
    "tyro._cli": _tyro,
}
"""Module -> what patches it after its import."""
