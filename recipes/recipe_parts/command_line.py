"""The command line: every field of several dataclasses, from YAML and from flags, and nothing else."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import yaml
from trl import TrlParser

from mcp_grpo.config import REMOVED, removed_problems
from mcp_grpo.errors import MCPGRPOError, SettingsError
from recipe_parts.help_text import help_text
from recipe_parts.other_names import explain, nearest, translate


CONFIGS = Path(__file__).parent.parent / "configs"
SECRETS = ("hub_token",)  # never written down
_KINDS = {"int": "a whole number", "float": "a number", "_int_or_float": "a number"}


class StrictParser(TrlParser):
    """
    [`~trl.TrlParser`] that refuses what it does not know in a sentence, with the names that are near.

    Args:
        dataclass_types (`Sequence[type]`):
            The dataclasses whose fields are settings. Those of the first are the recipe's own.
        description (`str`, *optional*, defaults to `""`):
            What the recipe does, for `--help`.
    """

    def __init__(self, dataclass_types: Sequence[type], description: str = "") -> None:
        # An abbreviation would be taken for the wrong field once there is another one that begins alike.
        super().__init__(list(dataclass_types), allow_abbrev=False, description=description)

    def parse(self, arguments: Sequence[str], defaults: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        """
        Read the command line and the YAML file that `--config` names; `defaults` come after both.

        Returns one instance per dataclass, then the settings as they were given: a `dict` of all fields, before any of them is
        derived from others. Written as YAML, it gives the same instances again.
        """
        arguments, path = split_config(arguments)
        in_file = self._read(path) if path else {}
        unknown = self.set_defaults_with_config(**{**(defaults or {}), **in_file})
        problems = self._unknowns({name[2:]: in_file[name[2:]] for name in unknown[::2]}, f"in {path}")
        problems += [
            self._choice_problem(f"--{action.dest}", str(in_file[action.dest]))
            for action in self._actions
            if action.choices and in_file.get(action.dest) not in (None, *map(_plain, action.choices))
        ]
        namespace, strings = self.parse_known_args(arguments)
        problems += self._strays(strings)
        if problems:
            raise SettingsError(" ".join(problems))
        try:
            *parsed, _ = self.parse_args_into_dataclasses(arguments, return_remaining_strings=True)
        except MCPGRPOError:
            raise
        except (ValueError, TypeError, ImportError) as error:  # TRL's and Transformers' own refusals
            raise SettingsError(" ".join(str(error).split())) from error
        return (*parsed, {name: value for name, value in vars(namespace).items() if name not in SECRETS})

    def given(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return the settings that are named on the command line, and nothing that is a default."""
        namespace = vars(self.parse_known_args(list(arguments))[0])
        flags = {each.partition("=")[0] for each in arguments if each.startswith("--")}
        named = {action.dest for action in self._actions if flags & set(action.option_strings)}
        return {name: namespace[name] for name in named if name in namespace}

    def error(self, message: str) -> NoReturn:
        """Refuse in a sentence, without the usage of hundreds of settings."""
        found = re.match(r"argument (--\w+)\S*: (.*)", message, re.DOTALL)
        raise SettingsError(self._value_problem(found[1], found[2]) if found else message)

    def format_help(self) -> str:
        """Write the settings by subject."""
        own = [field.name for field in fields(self.dataclass_types[0])]
        return help_text(self.prog, self.description or "", self._actions, own)

    def _read(self, path: str) -> dict[str, Any]:
        """Read a YAML file; settings in sections are translated, and it is said what they became."""
        try:
            config = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise SettingsError(f"{path} is not a YAML file: {' '.join(str(error).split())}.") from error
        if not isinstance(config, dict):
            raise SettingsError(
                f"{path} holds {type(config).__name__}, where settings are wanted: `name: value` lines."
            )
        variables = config.pop("env", {})
        if not isinstance(variables, dict):
            raise SettingsError(f"`env` in {path} must be a mapping of environment variables, got {variables!r}.")
        os.environ.update({str(name): str(value) for name, value in variables.items()})
        translated = translate(config, self._known(), self._with_dicts())
        if translated is None:
            return config
        became = "".join(f"\n  {note}" for note in translated.notes)
        if translated.problems:
            wrong = "".join(f"\n  {problem}" for problem in translated.problems)
            raise SettingsError(
                f"{path} has sections, as configurations of other trainers do; here all settings are in one list. These are not "
                f"certain, and must be set by their names here, or left out:{wrong}"
                + (f"\nThe others are:{became}" if became else "")
            )
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"{path} has sections, as configurations of other trainers do. It is read like this:{became}")
        return translated.settings

    def _known(self) -> list[str]:
        return [action.dest for action in self._actions if action.dest != "help"]

    def _with_dicts(self) -> set[str]:
        """Return the settings that take a mapping."""
        # Not from the fields: a parser changes their types.
        hints = [get_type_hints(kind) for kind in self.dataclass_types]
        return {name for each in hints for name, hint in each.items() if "dict" in str(hint)}

    def _unknowns(self, given: Mapping[str, Any], place: str) -> list[str]:
        """Say what to write instead of settings that there are not."""
        unknown = [name for name in given if name not in REMOVED]
        known = self._known()
        return [
            f"There is no setting `{name}` ({place}){explain(name, known)}" for name in unknown
        ] + removed_problems(given)

    def _strays(self, strings: Sequence[str]) -> list[str]:
        """Say what is wrong with strings of the command line that nothing took."""
        given: dict[str, Any] = {}
        for flag, following in pairwise([*strings, "--"]):
            if not flag.startswith("--"):
                continue
            name, _, value = flag[2:].partition("=")
            name, value = name.replace("-", "_"), value or ("true" if following.startswith("--") else following)
            is_off = name.removeprefix("no_") in REMOVED and name not in REMOVED
            given |= {name.removeprefix("no_"): "false"} if is_off else {name: value}
        if given:
            return self._unknowns(given, "on the command line")
        return [f"Nothing is known of {each!r} on the command line. Settings begin with `--`." for each in strings[:1]]

    def _value_problem(self, flag: str, problem: str) -> str:
        """Say what is wrong with the value of a setting, and what it may be."""
        action = self._option_string_actions[flag]
        meaning = ". ".join(" ".join(str(action.help or "").replace("%%", "%").split()).split(". ")[:2]).rstrip(".")
        if problem.startswith("expected"):
            return f"`{flag}` needs a value, and there is none: {meaning}."
        found = re.search(r"'([^']*)'|got (\S+)", problem)
        value = (found[1] or found[2] or "") if found else ""
        if action.choices:
            return self._choice_problem(flag, value)
        if kind := re.match(r"invalid (\w+) value", problem):
            return f"`{flag}` must be {_KINDS.get(kind[1], kind[1])}, got {value!r}: {meaning}."
        if "Truthy value" in problem:
            return f"`{flag}` must be true or false, got {value!r}: {meaning}."
        return f"`{flag}`: {problem}"

    def _choice_problem(self, flag: str, value: str) -> str:
        if problems := removed_problems({flag.lstrip("-"): value}):
            return problems[0]
        choices = [str(_plain(each)) for each in self._option_string_actions[flag].choices or ()]
        near = nearest(value, choices)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        return f"`{flag}` must be one of {', '.join(choices)}, got {value!r}.{hint}"


def split_config(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Take `--config` from a command line: return the other arguments, and the file it names, if any."""
    parts = [part for each in arguments for part in (each.split("=", 1) if each.startswith("--config=") else [each])]
    if "--config" not in parts:
        return parts, None
    index = parts.index("--config")
    named = parts[index + 1] if index + 1 < len(parts) else ""
    own = {path.stem: path for path in sorted(CONFIGS.glob("*.yaml"))}
    if named in own and not Path(named).is_file():
        named = str(own[named])
    if not Path(named).is_file():
        raise SettingsError(
            f"There is no configuration file {named!r}. Those of the recipes are {CONFIGS}/ {', '.join(own)}."
        )
    return parts[:index] + parts[index + 2 :], named


def write_settings(settings: dict[str, Any], path: Path) -> None:
    """Write settings as a file for `--config`."""
    path.write_text(yaml.safe_dump(_plain(settings), sort_keys=True, allow_unicode=True))


def read_settings(path: Path) -> dict[str, Any]:
    """Read what [`write_settings`] wrote."""
    return yaml.safe_load(path.read_text())


def _plain(value: Any) -> Any:
    """Return enumerations as their values, all else as it is."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return getattr(value, "value", value)
