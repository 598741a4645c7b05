"""Frameworks and agents that people point at an OpenAI or Anthropic address, as they come: texts, tools, schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from paceline.local.services import LocalServices
from tests.compat.harness import (
    SCRIPTS,
    HarnessReport,
    NotInstalled,
    node_environment,
    node_versions,
    python_environment,
    python_versions,
    run,
)
from tests.compat.obedient import NAME, obedient_coordinator

FOLDER = SCRIPTS / "frameworks"
CALLS_S = 300.0
SAID = "Rhine, Rhône and Po: three rivers."
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_call>'
BY_TOOL = '<tool_call>\n{"name": "City", "arguments": {"city": "Köln", "bridges": 7}}\n</tool_call>'
ASKED = {
    "said": SAID,
    "text": f"Say «{SAID}»",
    "tool": f"Say «{CALL}», then «The sum is {{result}}.»",
    "schema": 'Say «{"city": "Köln", "bridges": 7}»',
    "schema by tool": f"Say «{BY_TOOL}»",
    "schema and tool": f'Say «{CALL}», then «{{"city": "Köln", "bridges": {{result}}}}»',
}
WANTED: Mapping[str, str] = {"text": SAID, "tool": "The sum is 42.", "schema": "Köln 7", "schema and tool": "Köln 42"}
"""By what is asked for: a call's name without the API before it and the way behind it."""


@dataclass(frozen=True)
class Framework:
    """A client: what people call it, its packages, and the script that asks."""

    name: str
    script: str
    packages: tuple[str, ...]

    @property
    def is_node(self) -> bool:
        """Otherwise it is Python's."""
        return self.script.endswith(".mjs")

    def install(self) -> tuple[Path | str, Path, Mapping[str, str]]:
        """The program, the script that it runs, and the versions of the packages.

        Raises:
            NotInstalled: npm or pip says why.
        """
        name = Path(self.script).stem
        names = [package.partition("[")[0] for package in self.packages]
        if self.is_node:
            home = node_environment(name, *self.packages)
            script = home / self.script
            script.write_text((FOLDER / self.script).read_text())  # where Node looks for packages
            return "node", script, node_versions(home, names)
        programs = python_environment(name, *self.packages)
        return programs / "python", FOLDER / self.script, python_versions(programs, names)


FRAMEWORKS = (
    Framework("Claude Code", "claude_code.mjs", ("@anthropic-ai/claude-code",)),
    Framework("AI SDK", "ai_sdk.mjs", ("ai", "@ai-sdk/openai-compatible", "zod")),
    Framework("openai-agents", "openai_agents_client.py", ("openai-agents",)),
    Framework("pydantic-ai", "pydantic_ai_client.py", ("pydantic-ai-slim[openai]",)),
    Framework("LangChain", "langchain_client.py", ("langchain", "langchain-openai")),
    Framework("AutoGen", "autogen_client.py", ("autogen-agentchat", "autogen-ext[openai]")),
    Framework("LiteLLM", "litellm_client.py", ("litellm",)),
    Framework("Instructor", "instructor_client.py", ("instructor",)),
    Framework("LlamaIndex", "llama_index_client.py", ("llama-index-core", "llama-index-llms-openai-like")),
    Framework("huggingface_hub", "huggingface_hub_client.py", ("huggingface_hub",)),
    Framework("Aider", "aider_client.py", ("aider-chat",)),
)


def frameworks() -> list[HarnessReport]:
    """Each before one gateway; what fails keeps no other from its turn."""
    with (
        TemporaryDirectory() as folder,
        obedient_coordinator(Path(folder) / "model") as coordinator,
        LocalServices(Path(folder) / "gateway") as services,
    ):
        flags = {"model": str(Path(folder) / "model"), "coordinator.address": coordinator, "server.port": 0}
        services.start("gateway", "gateway", flags)
        services.await_serving("gateway")
        url = f"http://{services.address_of('gateway')}"
        return [outcome_of(framework, url) for framework in FRAMEWORKS]


def outcome_of(framework: Framework, url: str) -> HarnessReport:
    """One framework's outcome."""
    command = f"{'node' if framework.is_node else 'python'} {framework.script} URL {NAME}"
    try:
        program, script, versions = framework.install()
    except NotInstalled as error:
        return HarnessReport(framework.name, "not run", {}, (), (f"not installed: {error}",))
    try:
        lines = check(run([program, script, url, NAME, json.dumps(ASKED)], CALLS_S))
    except Exception as error:  # noqa: BLE001  # the others' outcomes are worth having
        return HarnessReport(framework.name, "failed", versions, [command], str(error).splitlines()[-12:])
    return HarnessReport(framework.name, "passed", versions, [command], lines)


def check(said: str) -> list[str]:
    """Hold a script's lines of JSON, `{"call", "text"}`, against what the model was told to say."""
    calls = [json.loads(line) for line in said.splitlines() if line.startswith('{"call"')]
    assert len({call["call"] for call in calls}) == len(calls) > 0, "no call twice, and one at least"
    for call in calls:
        name = call["call"].partition(", ")[0]
        expected = WANTED.get(name) or WANTED[name.partition(" ")[2]]
        assert call["text"] == expected, f"{call['call']}: {call['text']!r} instead of {expected!r}"
    return [f"{call['call']}: as it was told" for call in calls]
