"""A pullable target and its own draft: a pullable model, or one of the package paceline-drafts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.local.service_process import Flags, ServiceName
from paceline.local.settings import ServeSettings, draft_flags
from paceline.local.supervisor import SupervisedServices
from paceline.models.resolve import DRAFTS_PACKAGE, PROVENANCE_FILE, pulled_path, resolve_draft
from paceline.protocol.errors import InvalidInput

TARGET, DRAFT = "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"
PACKAGED = "smollm2-135m"
INSTALL = "(run: pip install paceline-drafts, or in a checkout: pip install ./drafts)"
TOLD = f"drafting from n-grams alone: {DRAFT} is not pulled (run: paceline pull {DRAFT})"


class _StartedFirst(Exception):
    """The first service would be started now."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))


def pretend_pulled(*names: str) -> None:
    for name in names:
        pulled_path(name).mkdir(parents=True)
        (pulled_path(name) / PROVENANCE_FILE).write_text("{}")


def settings(drafter: str = "auto", model: str = TARGET) -> ServeSettings:
    return ServeSettings(model=model, drafter=drafter)


def announced(chosen: ServeSettings, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is told before the first service starts."""

    def start(self: SupervisedServices, label: str, name: ServiceName, flags: Flags, threads: int = 1) -> None:
        raise _StartedFirst

    monkeypatch.setattr(SupervisedServices, "start", start)
    lines: list[str] = []
    with pytest.raises(_StartedFirst):
        SupervisedServices(chosen, folder, lines.append).start_all()
    return [line for line in lines if not line.startswith("cores")]


def output(*arguments: str) -> str:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments).stdout


@pytest.mark.parametrize("drafter", ["auto", "model"])
def test_a_pulled_draft_is_found(drafter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_pulled(TARGET, DRAFT)
    assert settings(drafter).draft_models == ("default",)
    assert resolve_draft("default", TARGET) == DRAFT
    assert announced(settings(drafter), tmp_path, monkeypatch) == []


@pytest.mark.parametrize(
    ("drafter", "models"),
    [("auto:mine+path/yours", ("mine", "path/yours")), ("model:default+me", ("default", "me")), ("mtp", ("mtp",))],
)
def test_several_drafts_of_ones_own(drafter: str, models: tuple[str, ...]) -> None:
    assert settings(drafter).draft_models == models
    assert draft_flags(settings(drafter), 1)["drafters"] == [f"model:{model}" for model in models]


@pytest.mark.parametrize("drafter", ["auto:", "model:a+", "ngram:a+b", "mtp:a"])
def test_names_that_are_left_out_or_out_of_place_are_refused(drafter: str) -> None:
    with pytest.raises(InvalidInput, match=r"drafter = .*PATH\+PATH several"):
        settings(drafter)


def test_auto_goes_on_without_a_draft_that_is_not_pulled_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_pulled(TARGET)
    assert settings().draft_models == ()
    assert announced(settings(), tmp_path, monkeypatch) == [TOLD]


@pytest.mark.parametrize("chosen", [settings("ngram"), settings("auto:mine"), settings(model=DRAFT)])
def test_who_wants_no_draft_or_another_is_told_nothing(
    chosen: ServeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_pulled(TARGET)
    assert announced(chosen, tmp_path, monkeypatch) == []


def test_a_draft_that_is_asked_for_must_be_pulled() -> None:
    pretend_pulled(TARGET)
    result = CliRunner().invoke(app, ["serve", TARGET, "--drafter", "model"])
    assert result.exit_code == 2
    assert f"paceline pull {DRAFT}" in result.stderr
    with pytest.raises(InvalidInput, match="none comes with target"):
        resolve_draft("default", DRAFT)


def test_pulling_names_the_licence_and_the_draft() -> None:
    pretend_pulled(TARGET)
    text = output("pull", TARGET)
    assert "licence: Apache-2.0" in text
    assert f"its draft model: {DRAFT} is not pulled (run: paceline pull {DRAFT})" in text
    pretend_pulled(DRAFT)
    assert f"its draft model {DRAFT} is pulled" in output("pull", TARGET)
    assert f"  draft: {DRAFT}" in output("models", "list")


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without paceline-drafts."""
    monkeypatch.setitem(sys.modules, DRAFTS_PACKAGE, None)


@pytest.mark.usefixtures("no_package")
@pytest.mark.parametrize("draft", ["default", "default-eagle3"])
def test_a_packaged_draft_that_is_asked_for_must_be_installed(draft: str) -> None:
    pretend_pulled(PACKAGED)
    result = CliRunner().invoke(app, ["serve", PACKAGED, "--drafter", f"model:{draft}"])
    assert result.exit_code == 2
    assert result.stderr == f"paceline: error: drafter = 'model:{draft}': must be installed first {INSTALL}\n"
    with pytest.raises(InvalidInput, match="none comes with target"):
        resolve_draft("default", DRAFT)


@pytest.mark.usefixtures("no_package")
def test_auto_goes_on_without_the_package_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_pulled(PACKAGED)
    chosen = settings(model=PACKAGED)
    assert chosen.draft_models == ()
    lacks = f"drafting from n-grams alone: paceline-drafts is not installed {INSTALL}"
    assert announced(chosen, tmp_path, monkeypatch) == [lacks]
    assert f"  draft: paceline-drafts is not installed {INSTALL}\n" in output("models", "list")
    assert f"its draft model: paceline-drafts is not installed {INSTALL}" in output("pull", PACKAGED)


def test_a_packaged_draft_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_pulled(PACKAGED)
    assert settings(model=PACKAGED).draft_models == ("default",)
    assert announced(settings(model=PACKAGED), tmp_path, monkeypatch) == []
    assert "its draft model is installed: --drafter model:default" in output("pull", PACKAGED)
