"""Write the reference pages from the code, when mkdocs collects its files."""

import argparse
import dataclasses
import inspect
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any


METRICS = Path(__file__).parent / "metrics.toml"
GENERATED = "<!-- generated from the code by docs/reference.py -->\n\n"
PYTHON = (
    "mcp_grpo",
    "mcp_grpo.rewards",
    "mcp_grpo.tasks",
    "mcp_grpo.desk.servers",
    "mcp_grpo.desk.tasks",
    "mcp_grpo.errors",
)
"""Modules whose public names are documented."""
NEEDS = {"servers": "`servers`", "vllm": "`use_vllm=True`"}
"""What a setting is of no use without."""
MADE_ONLY = ("Cassette", "TrainingProgress")
"""Classes whose objects are made by users and used by the library."""


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages; called by mkdocs."""
    from mkdocs.structure.files import File  # not needed by the tests

    for name, page in pages().items():
        files.append(File.generated(config, f"reference/{name}.md", content=page))
    return files


def pages() -> dict[str, str]:
    """Return the Markdown of each reference page, by its name."""
    written = {
        "settings": settings_page(),
        "servers": servers_page(),
        "metrics": metrics_page(),
        "command-line": command_line_page(),
        "python": python_page(),
    }
    return {name: GENERATED + page for name, page in written.items()}


# ---- Settings and server options ----


def own_settings() -> list[dataclasses.Field[Any]]:
    """Return the fields of `MCPGRPOConfig` that TRL does not have, and those that mean something else here."""
    from trl import GRPOConfig

    from mcp_grpo import MCPGRPOConfig

    upstream = {field.name for field in dataclasses.fields(GRPOConfig)}
    declared = inspect.get_annotations(MCPGRPOConfig)
    found = [field for field in dataclasses.fields(MCPGRPOConfig) if field.name in declared]
    return sorted(found, key=lambda field: field.name in upstream)


def settings_page() -> str:
    """Return the table of settings, one section for each stage of a step."""
    from trl import GRPOConfig

    from mcp_grpo import MCPGRPOConfig

    described = arguments_of(MCPGRPOConfig)
    sections: dict[str, list[str]] = {}
    for field in own_settings():
        meta = field.metadata
        meaning = [meta.get("help") or described.get(field.name, "")]
        if meta.get("choices"):
            meaning.append("One of " + ", ".join(f"`{_shown(choice)}`" for choice in meta["choices"]) + ".")
        if meta.get("range"):
            meaning.append(f"Range: `{meta['range']}`.")
        if meta.get("needs"):
            meaning.append(f"Needs {' and '.join(NEEDS[each] for each in meta['needs'])}.")
        is_changed = field.name in GRPOConfig.__dataclass_fields__
        stage = meta.get("stage") or ("TRL's, with another default" if is_changed else "settings")
        sections.setdefault(stage, []).append(_row(_named(field), " ".join(meaning)))
    num_own = sum(field.name not in GRPOConfig.__dataclass_fields__ for field in own_settings())
    page = (
        "# Settings\n\n"
        f"The {num_own} fields that `MCPGRPOConfig` has beside those of TRL's `GRPOConfig` and Transformers' "
        "`TrainingArguments`, which keep their meaning. Two of TRL's reach further here: `max_completion_length` counts "
        "tool results, too, and `chat_template_kwargs` reaches the template of every turn. Each is also a flag and a YAML "
        "key of `recipes/grpo_qwen3.py`.\n"
    )
    for stage, rows in sections.items():
        page += f"\n## {stage[0].upper()}{stage[1:]}\n\n" + _table(("Setting", "Meaning"), rows)
    return page


def servers_page() -> str:
    """Return the table of what an entry of the server file may say under `x-mcp-grpo`."""
    from mcp_grpo.tools.config import OPTIONS, ServerConfig

    described = arguments_of(ServerConfig)
    fields = {field.name: field for field in dataclasses.fields(ServerConfig)}
    rows = [_row(_named(fields[name]), fields[name].metadata.get("help") or described[name]) for name in OPTIONS]
    return (
        "# Server options\n\n"
        "Options of one server, under `x-mcp-grpo` in its entry of the `mcpServers` file. Other MCP clients ignore that "
        "key. The keys around it (`command`, `args`, `env`, `cwd`, `envFile`, `url`, `headers`) are those of other "
        "clients; [Your own server](../start/your-server.md) has them.\n\n" + _table(("Option", "Meaning"), rows)
    )


def _named(field: dataclasses.Field[Any]) -> str:
    """Return the first cell of a row: a name that can be linked to, its type and its default."""
    return f"`{field.name}`{{ #{field.name} }}<br><small>{_type(field.type)}, default {_code(_default(field))}</small>"


# ---- Metrics ----


def metrics_page() -> str:
    """Return the tables of metrics, one section for each group of them."""
    page = "# Metrics\n\n"
    content = tomllib.loads(METRICS.read_text(encoding="utf-8"))
    page += content["introduction"].strip() + "\n"
    for group in content["group"]:
        page += f"\n## {group['title']}\n\n" + (group["text"].strip() + "\n\n" if "text" in group else "")
        page += _table(("Metric", "Meaning"), [_row(_code(name), text) for name, text in group["metrics"].items()])
    return page


def described_metrics() -> list[str]:
    """Return the names of all metrics that are described; `*` stands for a part that varies."""
    content = tomllib.loads(METRICS.read_text(encoding="utf-8"))
    return [name for group in content["group"] for name in group["metrics"]]


# ---- The command line ----


def command_line_page() -> str:
    """Return every command with its arguments, as `--help` has them."""
    from mcp_grpo import cli

    parser = cli._parser()
    page = f"# Command line\n\n{parser.description}\n"
    for command, text in _commands(parser):
        page += f"\n## `{command.prog}`\n\n{_sentence(text)}\n\n```text\n{_usage(command)}\n```\n\n"
        rows = [
            _row(_code(" ".join([*action.option_strings, _placeholder(action)]).strip()), _sentence(_help(action)))
            for action in command._actions
            if not isinstance(action, argparse._HelpAction)
        ]
        page += _table(("Argument", "Meaning"), rows)
    return page


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Yield every command that does something, with what it is for."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help for choice in action._choices_actions}
            for name, command in action.choices.items():
                if any(isinstance(inner, argparse._SubParsersAction) for inner in command._actions):
                    yield from _commands(command)
                else:
                    yield command, texts.get(name) or ""


def _usage(command: argparse.ArgumentParser) -> str:
    needed = [_placeholder(action) for action in command._actions if not action.option_strings]
    return " ".join([command.prog, *needed, "[options]"])


def _placeholder(action: argparse.Action) -> str:
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    if action.nargs == 0:
        return ""
    return str(action.metavar or (action.dest.upper() if action.option_strings else action.dest))


def _help(action: argparse.Action) -> str:
    return (action.help or "") % {"default": action.default}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".") if text else ""


# ---- Python ----


def python_page() -> str:
    """Return the public names of the library with their docstrings."""
    page = "# Python\n\nWhat can be imported, by module. Everything else is internal and may change.\n"
    anchors = {name for module in PYTHON for name in _public(module)}
    for module in PYTHON:
        page += f"\n## `{module}`\n\n{_markdown(inspect.getdoc(import_module(module)) or '', anchors)}\n"
        for name, thing in _public(module).items():
            if module != "mcp_grpo" and name in import_module("mcp_grpo").__all__:
                page += f"\n### `{name}`\n\nThe same as [`mcp_grpo.{name}`](#{name.lower()}).\n"
                continue
            page += _documented(name, thing, anchors)
    return page


def _public(module: str) -> dict[str, Any]:
    content = import_module(module)
    own = (name for name, thing in vars(content).items() if getattr(thing, "__module__", None) == module)
    names = getattr(content, "__all__", None) or sorted(name for name in own if not name.startswith("_"))
    return {name: getattr(content, name) for name in names if callable(getattr(content, name))}


def _documented(name: str, thing: Any, anchors: set[str]) -> str:
    text = inspect.getdoc(thing) or ""
    page = f"\n### `{name}`\n\n"
    if dataclasses.is_dataclass(thing) and name.endswith("Config"):
        return page + f"{text.split('Args:')[0].strip()}\n\n[Settings](settings.md) has all of its fields.\n"
    if not (inspect.isclass(thing) and issubclass(thing, Exception)):
        page += f"```python\n{_signature(name, thing)}\n```\n\n"
    page += _markdown(text, anchors) + "\n"
    for method, function in _methods(thing) if inspect.isclass(thing) and name not in MADE_ONLY else []:
        page += f"\n#### `{name}.{method}`\n\n"
        if isinstance(function, property):
            page += _markdown(inspect.getdoc(function) or "", anchors) + "\n"
        else:
            page += f"```python\n{_signature(method, function)}\n```\n\n{_markdown(inspect.getdoc(function) or '', anchors)}\n"
    return page


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield what the library itself adds to a class and documents, in the order of the code."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if not base.__module__.startswith("mcp_grpo"):
            continue
        for name, member in vars(base).items():
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            is_shown = isinstance(function, property | types.FunctionType) or hasattr(function, "func")
            doc = function.__doc__ if is_shown else None  # its own: what is inherited is documented upstream
            if name.startswith("_") or name in seen or not doc or doc.strip().startswith("See ["):
                continue
            seen.add(name)
            yield name, property(function.func) if hasattr(function, "func") else function


def _signature(name: str, thing: Any) -> str:
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return name
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    shown = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    shown = re.sub(r"<factory>|<object object at 0x\w+>", "...", shown)
    if len(name + shown) <= 100:
        return name + shown
    inner = ",\n    ".join(re.sub(r"<factory>", "...", str(parameter)) for parameter in parameters)
    return f"{name}(\n    {inner},\n)"


def arguments_of(thing: Any) -> dict[str, str]:
    """Return what a docstring says of each argument, as one paragraph."""
    found = {}
    for heading, body in _parts(inspect.getdoc(thing) or ""):
        if heading == "Args":
            found |= {name: text for name, _, text in _entries(body)}
    return found


def _parts(doc: str) -> Iterator[tuple[str, str]]:
    """Yield the sections of a docstring in Hugging Face's style; what comes first has no heading."""
    pieces = re.split(r"^(Args|Returns|Raises|Yields|Examples?):[ \t]*(?:\n|$)", doc, flags=re.MULTILINE)
    yield "", pieces[0].strip()
    for heading, body in zip(pieces[1::2], pieces[2::2], strict=True):
        yield heading, textwrap.dedent(body).strip()


def _entries(body: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, type and description of each argument."""
    for match in re.finditer(r"^(\S+) \((.*?)\):\n((?:[ \t]+.*\n?|\n)*)", body + "\n", flags=re.MULTILINE):
        yield match[1], match[2], " ".join(match[3].split())


def _markdown(doc: str, anchors: set[str]) -> str:
    """Turn a docstring into Markdown, with links to names that are on the page."""
    written = []
    for heading, body in _parts(doc):
        if heading == "Args":
            items = [f"- **`{name}`** ({kind}): {text}" for name, kind, text in _entries(body)]
            written.append("**Arguments**\n\n" + "\n".join(items))
        elif heading in ("Example", "Examples"):
            written.append("**Example**\n\n" + (body if "```" in body else f"```python\n{body}\n```"))
        elif heading:
            written.append(f"**{heading}**: " + " ".join(body.split()))
        else:
            written.append(body)

    def link(match: re.Match[str]) -> str:
        name = match[1].removeprefix("~")
        return f"[`{name}`](#{name.lower()})" if name in anchors else f"`{name}`"

    text = "\n\n".join(part for part in written if part)
    return re.sub(r"\[`([^`]+)`\](?!\()", link, text)


# ---- Tables ----


def _table(head: Iterable[str], rows: Iterable[str]) -> str:
    head = list(head)
    lines = [_row(*head), "|" + "---|" * len(head), *rows]
    return '<div class="fields" markdown>\n\n' + "\n".join(lines) + "\n\n</div>\n"


def _row(*cells: str) -> str:
    plain = (re.sub(r"\[(`[^`]+`)\](?!\()", r"\1", " ".join(cell.split())) for cell in cells)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in plain) + " |"


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return _shown(field.default)
    return _shown(field.default_factory()) if field.default_factory is not dataclasses.MISSING else "none"


def _type(kind: Any) -> str:
    """Return a type as it is written, without the `None` that a default of `None` says already."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return " or ".join(_type(each) for each in typing.get_args(kind) if each is not types.NoneType)
    if typing.get_origin(kind) is typing.Literal:
        return "`str`" if all(isinstance(choice, str) for choice in typing.get_args(kind)) else "`int`"
    shown = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
    return _code(re.sub(r"\b(typing|collections\.abc)\.", "", shown))
