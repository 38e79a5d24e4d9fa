"""The command line: every field of several dataclasses, from YAML and from flags, and nothing else."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from trl import TrlParser

from mcp_grpo.errors import SettingsError


SECRETS = ("hub_token",)  # never written down


class StrictParser(TrlParser):
    """
    [`~trl.TrlParser`] that refuses what it does not know, with the nearest name that it does.

    Args:
        dataclass_types (`Sequence[type]`):
            The dataclasses whose fields are settings.
    """

    def __init__(self, dataclass_types: Sequence[type]) -> None:
        # An abbreviation would be taken for the wrong field once there is another one that begins alike.
        super().__init__(list(dataclass_types), allow_abbrev=False)

    def parse(self, arguments: Sequence[str]) -> tuple[Any, ...]:
        """
        Read the command line, and the YAML file that `--config` names.

        Args:
            arguments (`Sequence[str]`):
                The command line, without the program.

        Returns:
            `tuple[Any, ...]`: One instance per dataclass, then the settings as they were given: a `dict` of all fields,
            before any of them is derived from others. Written as YAML, it gives the same instances again.

        Raises:
            [`SettingsError`]: If a setting is unknown; the message names the nearest one.
        """
        arguments = _with_config_apart(arguments)
        *parsed, in_file, on_line = self.parse_args_and_config(
            arguments, return_remaining_strings=True, separate_remaining_strings=True
        )
        for place, strings in (("the configuration file", in_file), ("the command line", on_line)):
            if strings:
                self._refuse(place, strings)
        if "--config" in arguments:
            index = arguments.index("--config")
            arguments = arguments[:index] + arguments[index + 2 :]
        settings = vars(self.parse_args(arguments))
        return (*parsed, {name: value for name, value in settings.items() if name not in SECRETS})

    def _refuse(self, place: str, strings: Sequence[str]) -> None:
        known = [action.dest for action in self._actions if action.dest != "help"]
        given = [each[2:].partition("=")[0].replace("-", "_") for each in strings if each.startswith("--")]
        if not given:
            raise SettingsError(f"Nothing is known of {strings[0]!r} on {place}. Settings begin with `--`.")
        advice = []
        for name in given:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            advice.append(f"`{name}` (did you mean `{near[0]}`?)")
        raise SettingsError(f"There is no setting {' and no '.join(advice)}, as {place} has it.")


def _with_config_apart(arguments: Sequence[str]) -> list[str]:
    """`--config=file` as two strings, as `TrlParser` wants it, and only if the file is there."""
    parts = [part for each in arguments for part in (each.split("=", 1) if each.startswith("--config=") else [each])]
    if "--config" in parts:
        index = parts.index("--config") + 1
        if index == len(parts) or not Path(parts[index]).is_file():
            named = parts[index] if index < len(parts) else ""
            folder = Path(__file__).parent.parent / "configs"
            names = ", ".join(sorted(path.stem for path in folder.glob("*.yaml")))
            raise SettingsError(
                f"There is no configuration file {named!r}. Those of the recipes are {folder}/ {names}."
            )
    return parts


def write_settings(settings: dict[str, Any], path: Path) -> None:
    """
    Write settings as a file for `--config`.

    Args:
        settings (`dict[str, Any]`):
            From [`StrictParser.parse`].
        path (`Path`):
            File to write.
    """
    path.write_text(yaml.safe_dump(_plain(settings), sort_keys=True, allow_unicode=True))


def read_settings(path: Path) -> dict[str, Any]:
    """
    Settings of an earlier run.

    Args:
        path (`Path`):
            What [`write_settings`] wrote.

    Returns:
        `dict[str, Any]`: The settings.
    """
    return yaml.safe_load(path.read_text())


def _plain(value: Any) -> Any:
    """Enumerations as their values, all else as it is."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return getattr(value, "value", value)
