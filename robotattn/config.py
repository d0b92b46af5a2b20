"""Strict configuration: YAML text → frozen dataclasses, and back without loss.

The types of the fields decide what a value may be; nothing is guessed. The scalars follow YAML 1.2 (``on``, ``0777``,
``12:30:45`` are text), ``3e-4`` is a number, duplicate keys, anchors and tags are refused. A union of dataclasses is a
mapping with one key, the class name in lower case without "Config": ``policy: {act: {chunk: 8}}``. Ranges are checked
by the dataclass's ``__post_init__``, which raises a ValueError whose message starts with the name of the field.
"""

import dataclasses
import difflib
import math
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")
At = tuple[str, ...]  # the keys from the root to a value

ONE_OF = "one_of"
"""``Annotated[X, ONE_OF]``: write the dataclass X with its name even if it is the only member of its union (so far)."""

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")  # no leading zeros: 010 is 8 to some readers and 10 to others
_FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)")
_WORDS: dict[str, bool | None] = dict.fromkeys(("", "~", "null", "Null", "NULL"))
_WORDS |= dict.fromkeys(("true", "True", "TRUE"), True) | dict.fromkeys(("false", "False", "FALSE"), False)


class UsageError(ValueError):
    """What the user gave cannot be used; the message says where, what, and what was allowed."""

    exit_code = 2


@dataclasses.dataclass(frozen=True)
class _Source:
    """Where values came from: name of the file, line of each path, and the class at the root."""

    name: str
    root: Any
    lines: Mapping[At, int] = dataclasses.field(default_factory=dict)

    def error(self, at: At, message: str) -> UsageError:
        line = next((self.lines[at[:n]] for n in range(len(at), -1, -1) if at[:n] in self.lines), None)
        place = self.name if line is None else f"{self.name}:{line}"
        return UsageError(f"{place}: {'.'.join(at)}{': ' if at else ''}{message}")


def load(path: str | Path, cls: type[T]) -> T:
    """Read a YAML file into the dataclass `cls`; raises UsageError with file, line and dotted path."""
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        beside = ", ".join(sorted(p.name for p in path.parent.glob("*.yaml"))) or "no *.yaml"
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8 text ({error.reason})"
        raise UsageError(f"{path}: {reason}; in {path.parent}: {beside}") from None
    return loads(text, cls, str(path))


def loads(text: str, cls: type[T], source: str = "configuration") -> T:
    """Read YAML text into the dataclass `cls`; `source` names it in errors."""
    value, lines = parse(text, source)
    if value is None:
        raise UsageError(f"{source}: is empty; required: {_listed(_required(cls)) or 'a mapping'}")
    return _convert(cls, value, (), _Source(source, cls, lines))


def parse(text: str, source: str = "configuration") -> tuple[Any, dict[At, int]]:
    """Read YAML text as plain dicts, lists and scalars, with the line of every path; an empty text is None."""
    try:
        node = _Loader(text).get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        tab = mark and "\t" in text.splitlines()[min(mark.line, len(text.splitlines()) - 1)]
        hint = "a tab; YAML is indented with spaces" if tab else error.problem
        raise UsageError(f"{where}: not valid YAML: {hint}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UsageError(f"{source}: not valid YAML: nested too deeply") from None
    lines: dict[At, int] = {}
    return (None if node is None else _plain(node, (), lines, source)), lines


def from_dict(cls: type[T], data: Any, source: str = "configuration") -> T:
    """Build the dataclass `cls` from plain values (as `to_dict` writes them), as strictly as from a file."""
    return _convert(cls, data, (), _Source(source, cls))


class _Loader(yaml.BaseLoader):
    """Every scalar stays text until `_scalar`; anchors and aliases are refused (no inheritance, no surprises)."""

    def compose_node(self, parent, index):
        event = self.peek_event()
        if getattr(event, "anchor", None):
            raise yaml.MarkedYAMLError(problem="anchors and aliases are not supported", problem_mark=event.start_mark)
        if getattr(event, "tag", None) not in (None, "!"):
            raise yaml.MarkedYAMLError(problem=f"tag {event.tag} is not supported", problem_mark=event.start_mark)
        return super().compose_node(parent, index)


def _plain(node: yaml.Node, at: At, lines: dict[At, int], source: str) -> Any:
    """Turn a YAML node into dicts, lists and scalars, and note the line of every path."""
    lines.setdefault(at, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*at, str(i)), lines, source) for i, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node.value) if node.style is None else node.value
    result: dict[str, Any] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise UsageError(f"{source}:{line}: {'.'.join(at)}{': ' if at else ''}a key must be a word")
        path = (*at, key.value)
        if key.value in result:
            raise UsageError(f"{source}:{line}: {'.'.join(path)}: given twice (first in line {lines[path]})")
        lines[path] = line
        result[key.value] = _plain(value, path, lines, source)
    return result


def _scalar(text: str) -> Any:
    """Resolve an unquoted scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text)
    return float(text.lower().replace(".inf", "inf")) if _FLOAT.fullmatch(text) else text


def _convert(kind: Any, value: Any, at: At, source: _Source) -> Any:
    """Convert a plain value to the type `kind`, or raise with the path."""
    kind, named = _bare(kind)
    origin, arguments = get_origin(kind), get_args(kind)
    if named or _is_choice(kind):
        return _convert_choice(kind, value, at, source)
    if dataclasses.is_dataclass(kind):
        return _convert_dataclass(kind, value, at, source)
    if origin in (Union, types.UnionType):
        return _convert_union(kind, arguments, value, at, source)
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in arguments):
            return value
        raise source.error(at, f"got {value!r}, allowed: {_listed(map(str, arguments))}")
    if origin is tuple:
        return _convert_tuple(arguments, value, at, source)
    if origin is dict:
        if not isinstance(value, dict):
            raise source.error(at, f"expected a mapping, got {_shown(value)}")
        return {key: _convert(arguments[1], item, (*at, key), source) for key, item in value.items()}
    return _convert_scalar(kind, value, at, source)


def _convert_scalar(kind: Any, value: Any, at: At, source: _Source) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and number and not math.isnan(value):
        return float(value)
    if kind is int and number and math.isfinite(value) and value == int(value):
        return int(value)
    if kind is Path and isinstance(value, str) and value:
        return Path(value)
    if kind in (bool, str) and type(value) is kind:
        return value
    if kind is type(None) and value is None:
        return None
    if kind not in _EXPECTED:
        raise TypeError(f"{'.'.join(at)}: configurations do not support the type {kind}")
    raise source.error(at, f"expected {_EXPECTED[kind]}, got {_shown(value)}")


_EXPECTED = {
    bool: "true or false (no quotes)",
    int: "a whole number without quotes or leading zeros",
    float: "a number without quotes or leading zeros",
    str: "text (put quotes around a number or a word such as true)",
    Path: "a path",
    type(None): "null",
}


def _convert_tuple(arguments: tuple[Any, ...], value: Any, at: At, source: _Source) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise source.error(at, f"expected a list, got {_shown(value)}; write [{value}]")
    kinds = arguments[:1] * len(value) if arguments[-1:] == (Ellipsis,) else arguments
    if len(kinds) != len(value):
        raise source.error(at, f"expected a list of {len(kinds)}, got {len(value)}")
    return tuple(_convert(k, item, (*at, str(i)), source) for i, (k, item) in enumerate(zip(kinds, value, strict=True)))


def _convert_union(kind: Any, members: tuple[Any, ...], value: Any, at: At, source: _Source) -> Any:
    """Convert to the only member beside None, or to the first scalar member that fits."""
    if value is None and type(None) in members:
        return None
    rest = [member for member in members if member is not type(None)]
    if len(rest) == 1 or all(_is_dataclass(member) for member in rest):
        return _convert(Union[tuple(rest)], value, at, source)  # noqa: UP007 - built at run time
    for member in sorted(rest, key=lambda member: member is float):  # an int stays an int in `int | float`
        try:
            return _convert(member, value, at, source)
        except UsageError:
            continue
    raise source.error(at, f"got {_shown(value)}, allowed: {kind}")


def _convert_choice(kind: Any, value: Any, at: At, source: _Source) -> Any:
    members = {name_of(member): member for member in _members(kind)}
    allowed = f"a mapping with one key, one of: {_listed(members)}"
    if not isinstance(value, dict) or len(value) != 1:
        raise source.error(at, f"expected {allowed}; got {_shown(value)}")
    ((key, fields),) = value.items()
    if key not in members:
        raise source.error((*at, key), f"unknown; nearest: {_nearest(key, members)}; expected {allowed}")
    return _convert_dataclass(members[key], {} if fields is None else fields, (*at, key), source)


def _convert_dataclass(cls: Any, value: Any, at: At, source: _Source) -> Any:
    hints = _hints(cls)
    if not isinstance(value, dict):
        raise source.error(at, f"expected a mapping with {_listed(hints)}; got {_shown(value)}")
    for key in value:
        if key not in hints:
            raise source.error((*at, str(key)), f"unknown key; {_suggestion(str(key), at, hints, source)}")
    values = {key: _convert(hints[key], item, (*at, key), source) for key, item in value.items()}
    if missing := [name for name in _required(cls) if name not in values]:
        raise source.error(at, f"missing {_listed('.'.join((*at, name)) for name in missing)}")
    try:
        return cls(**values)
    except ValueError as error:
        first, _, rest = str(error).partition(" ")
        name = first.rstrip(":")
        raise source.error((*at, name), rest) if name in hints else source.error(at, str(error)) from None


def _suggestion(key: str, at: At, hints: Mapping[str, Any], source: _Source) -> str:
    elsewhere = [path for path in _paths(source.root) if path[-1] == key and path[:-1] != at]
    if elsewhere:
        return f"it belongs at {' or '.join('.'.join(path) for path in elsewhere)}"
    return f"nearest: {_nearest(key, hints)}; allowed: {_listed(hints)}"


def _nearest(key: str, names: Mapping[str, Any]) -> str:
    """Return the most similar name; initials count (learning_rate → lr)."""
    word = key.lower().replace("-", "_")
    initials = "".join(part[:1] for part in word.split("_"))
    return max(names, key=lambda name: 0.8 if name == initials else difflib.SequenceMatcher(None, word, name).ratio())


def _paths(cls: Any, at: At = ()) -> Iterator[At]:
    for name, hint in _hints(cls).items():
        yield (*at, name)
        kind, named = _bare(hint)
        for member in _members(kind):
            inner = (*at, name, name_of(member)) if named or _is_choice(kind) else (*at, name)
            yield from _paths(member, inner)


def name_of(cls: type) -> str:
    """Return the key of a dataclass in a union: ACTConfig → act."""
    return cls.__name__.removesuffix("Config").lower()


def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _required(cls: Any) -> list[str]:
    missing = dataclasses.MISSING
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return [f.name for f in fields if f.init and f.default is missing and f.default_factory is missing]


def _bare(kind: Any) -> tuple[Any, bool]:
    """Strip Annotated; say whether it was marked ONE_OF."""
    if get_origin(kind) is Annotated:
        return get_args(kind)[0], ONE_OF in kind.__metadata__
    return kind, False


def _is_dataclass(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _members(kind: Any) -> list[type]:
    return [member for member in get_args(kind) or (kind,) if _is_dataclass(member)]


def _is_choice(kind: Any) -> bool:
    """Tell a union of two or more dataclasses (without None: `_convert_union` has dealt with that)."""
    arguments = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()
    return len(arguments) > 1 and all(_is_dataclass(member) for member in arguments)


def _listed(names: Any) -> str:
    return ", ".join(names)


def _shown(value: Any) -> str:
    kind = {dict: "a mapping", list: "a list", str: "text", bool: "a truth value", type(None): "nothing"}.get(
        type(value)
    )
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'}{f' ({kind})' if kind else ''}"


def to_dict(config: Any) -> dict[str, Any]:
    """Write a dataclass as plain dicts, lists and scalars: what `from_dict` reads back to an equal object."""
    return {name: _unconvert(hint, getattr(config, name)) for name, hint in _hints(type(config)).items()}


def _unconvert(kind: Any, value: Any) -> Any:
    kind, named = _bare(kind)
    if _is_dataclass(type(value)):
        choice = named or len(_members(kind)) > 1
        return {name_of(type(value)): to_dict(value)} if choice else to_dict(value)
    if isinstance(value, tuple | list):
        arguments = next((get_args(k) for k in (kind, *get_args(kind)) if get_origin(k) is tuple), (Any, ...))
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        return [_unconvert(k, item) for k, item in zip(kinds, value, strict=True)]
    if isinstance(value, dict):
        inner = next((get_args(k)[1] for k in (kind, *get_args(kind)) if get_origin(k) is dict), Any)
        return {key: _unconvert(inner, item) for key, item in value.items()}
    return str(value) if isinstance(value, Path) else value


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that `_scalar` would not read back as text."""


_Dumper.yaml_implicit_resolvers = {}
_Dumper.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(~|null|Null|NULL|)$"), None)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), None)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(f"({_INT.pattern})$"), None)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"({_FLOAT.pattern})$"), None)


def dumps(config: Any) -> str:
    """Write a dataclass (or plain dict) as YAML text with every field."""
    data = config if isinstance(config, dict) else to_dict(config)
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=120)


def dump(config: Any, path: str | Path) -> None:
    """Write a dataclass as a YAML file with every field."""
    Path(path).write_text(dumps(config), encoding="utf-8")
