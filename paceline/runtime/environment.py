"""The settings that a program's environment gives.

A setting's variable is the program's prefix and the key in capitals, with two underscores for the dot:
`engine.threads` of the target service is `PACELINE_TARGET_ENGINE__THREADS`. A variable with the prefix that names
no setting is refused, like an unknown key of a file: a setting that is misspelt would silently keep its default.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping

from paceline.protocol.errors import InvalidInput
from paceline.runtime.fields import Setting, variable_of
from paceline.runtime.sources import SourcedValue

FILE = "config"
"""`<PREFIX>CONFIG` names the file, as `--config` does."""
_LINK = re.compile(r"(tcp|udp|sctp)://")


def settings_from(
    environment: Mapping[str, str], settings: Iterable[Setting], prefix: str, other_variables: Collection[str] = ()
) -> dict[str, SourcedValue]:
    """The settings that variables set, by dotted key; an empty variable sets nothing.

    The values of a list stand between blanks. Any other value is text, which the setting's type parses.

    Args:
        environment: the process's.
        settings: of the program.
        prefix: of its variables.
        other_variables: names of further variables that mean something.

    Raises:
        InvalidInput: a variable that begins with the prefix and names no setting.
    """
    by_name = {setting.variable: setting for setting in settings}
    values: dict[str, SourcedValue] = {}
    for name in of_program(environment, prefix):
        setting, text = by_name.get(name), environment[name]
        if setting is not None:
            if text:
                values[setting.key] = SourcedValue(text.split() if setting.is_list else text, name)
        elif name not in other_variables and name != variable_of(prefix, FILE):
            raise InvalidInput.of("variable", name, _nearest(name, by_name))
    return values


def of_program(environment: Mapping[str, str], prefix: str) -> list[str]:
    """The variables that are meant for a program.

    Kubernetes sets variables in every container for each Service of the namespace: for `paceline-target` they are
    `PACELINE_TARGET_PORT=tcp://…`, `PACELINE_TARGET_SERVICE_HOST` and more. These are left out.
    """
    ports = (name for name, value in environment.items() if name.endswith("_PORT") and _LINK.match(value))
    links = tuple(link for port in ports for link in (port, f"{port.removesuffix('PORT')}SERVICE_"))
    return sorted(name for name in environment if name.startswith(prefix) and not name.startswith(links))


def _nearest(name: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(name, names, 1, cutoff=0.0)
    return f"the name of a setting, such as {near[0]}" if near else "left out: there is no such setting"
