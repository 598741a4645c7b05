"""The reference of all settings: `python -m tools.configuration` writes docs/configuration.md, `--check` compares it.

Names, defaults, limits and meanings are those of the types in `paceline/runtime/config.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.cli.config import PROGRAMS
from paceline.runtime.fields import Setting, every_setting
from paceline.runtime.sources import toml_value

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
INTRODUCTION = """\
# Configuration

<!-- Made by `python -m tools.configuration` from the types in paceline/runtime/config.py; `make check` compares. -->

Every setting of a service has one key. A file, the environment and flags give it by names that follow from the key.

| | name | example |
|---|---|---|
| file | the key, in TOML | `engine.threads = 6`, or `threads = 6` below `[engine]` |
| environment | prefix, then the key in capitals, `__` for the dot | `PACELINE_TARGET_ENGINE__THREADS=6` |
| flag | the key's last part | `--threads 6` |

**A flag overrides a variable, a variable overrides the file, the file overrides the default.** `--config FILE` names
the file, and so does the variable `<prefix>CONFIG`. A few flags have another name than their key's last part, and a
few settings have none (–): the tables below say which.

- **What is unknown is refused**, in the environment as in the file and on the command line. A variable that begins
  with a service's prefix and names no setting ends the service with exit code 2: a setting that is misspelt would
  otherwise keep its default and nobody would know. The variables that Kubernetes makes of a Service's name
  (`PACELINE_TARGET_PORT=tcp://…` and those that go with it) are left out.
- **What is wrong is named** with key, value, limit and source: `engine.threads = '-1': must be valid (Input should
  be greater than or equal to 0); given by PACELINE_TARGET_ENGINE__THREADS`.
- **Values of variables**: the entries of a list stand between blanks; `true` and `false` switch; an empty variable
  gives nothing.
- **A ConfigMap** has variables as its keys (`envFrom`), or holds the file, which is mounted and named by
  `<prefix>CONFIG`. A service reads both once, when it starts.
- **`paceline serve`** has settings of its own and configures the services that it starts. Their variables don't
  reach them then; `serve` names those that it finds.

```sh
paceline config show target-service --config target.toml      # the settings in force, each with what gave it
paceline config check coordinator --config coordinator.toml   # valid, or the first setting that isn't: exit code 2
paceline config schema draft-service                          # the JSON schema of the file
```

Options of commands that are no settings of a service (`paceline generate --top-p`) read
`PACELINE_<COMMAND>_<OPTION>`. `PACELINE_HOME` is the model cache. `HF_HOME`, `HF_TOKEN`, `HF_HUB_OFFLINE` and the
`OTEL_…` variables mean what they mean elsewhere.
"""
HEADER = "| key | flag | variable | default | meaning |\n|---|---|---|---|---|"


def page() -> str:
    """The whole reference."""
    return INTRODUCTION + "".join(_section(name, kind) for name, kind in PROGRAMS.items())


def _section(name: str, kind: type[Any]) -> str:
    title = f"\n## paceline {name}\n\nVariables begin with `{kind.variables}`.\n"
    return f"{title}\n{HEADER}\n" + "".join(f"{row}\n" for row in _rows(kind))


def _rows(kind: type[Any]) -> Iterator[str]:
    for setting in every_setting(kind):
        flag = f"`{setting.flag_name}`" if setting.flag else "–"
        flag += f", `{setting.short}`" if setting.short else ""
        cells = (f"`{setting.key}`", flag, f"`{setting.variable}`", _default(setting), setting.help)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(setting: Setting) -> str:
    return "unset" if setting.default is None else f"`{toml_value(setting.default)}`"


def main() -> int:
    """Write the page, or say that it is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if the page is not what this would write")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    sys.stderr.write("docs/configuration.md is stale: python -m tools.configuration\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
