"""Settings of the runs of a turn by name: what their requests ask for, and of which services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.local.drafter_choice import DrafterChoice
from paceline.protocol.errors import require
from paceline.protocol.generation import SpeculationSettings
from paceline.protocol.proposal import AUTO, MODEL, NGRAM, NONE, Acceptance
from paceline_lab.bench.speed.groups import GenerationRunner

PLAIN, AGAIN = "target-only", "target-only again"
OFF = SpeculationSettings(off=True)


@dataclass(frozen=True)
class SpeedSetting:
    """Settings of requests to the services that were started for a drafter."""

    group: str
    speculation: SpeculationSettings
    acceptance: Acceptance = Acceptance.COUPLED

    @property
    def is_off(self) -> bool:
        """Return whether the setting is target-only."""
        return self.speculation.off


def beside_plain(group: str, settings: Mapping[str, SpeedSetting]) -> dict[str, SpeedSetting]:
    """Put target-only twice before settings, on the services of a group."""
    return {PLAIN: SpeedSetting(group, OFF), AGAIN: SpeedSetting(group, OFF), **settings}


def drafter_settings(
    drafters: Sequence[str], rules: Sequence[Acceptance], counts: Sequence[int | None]
) -> dict[str, SpeedSetting]:
    """Return settings of each drafter on services of its own, beside target-only on our fastest.

    Args:
        drafters: drafters as `paceline serve` takes them; `none` is target-only, which is there anyway.
        rules: acceptance rules.
        counts: numbers of proposed tokens; None: the coordinator chooses.
    """
    settings = {}
    for drafter in drafters:
        for rule in rules if drafter != NONE else ():
            for count in counts:
                speculation = SpeculationSettings(drafter=drafter.partition(":")[0], num_draft_tokens=count)
                settings[short_name(drafter, rule, count)] = SpeedSetting(drafter, speculation, rule)
    return beside_plain(NONE, settings)


def short_name(drafter: str, rule: Acceptance = Acceptance.COUPLED, count: int | None = None) -> str:
    """Return a name for tables, which has no folder of this machine in it."""
    kind, colon, rest = drafter.partition(":")
    parts = [kind + colon + rest.rstrip("/").rpartition("/")[2]]
    parts += [rule.value] if rule is not Acceptance.COUPLED else []
    parts += [f"k={count}"] if count is not None else []
    return " ".join(parts)


def fixed_settings(
    drafters: Sequence[str],
    rules: Sequence[Acceptance],
    counts: Sequence[int | None],
    lengths: Sequence[int],
    alone: Sequence[str],
) -> dict[str, SpeedSetting]:
    """Return `auto`, which is what the planner chooses for one drafter, beside fixed settings on the same services.

    Args:
        drafters: one drafter, as `paceline serve` takes it, and not none.
        rules: one acceptance rule.
        counts: None alone, which is the planner's: the lengths have the numbers.
        lengths: constant numbers of proposed tokens; 0 is target-only, which is there anyway.
        alone: the services' drafters, as requests name them; each runs alone, with the planner's k and each length.

    Raises:
        InvalidInput: nothing to compare with, bad lengths, or not one drafter.
    """
    require(len(lengths) + len(alone) > 0, "k", lengths, "one number or more")
    comparable = len(drafters) == len(rules) == 1 and drafters[0] != NONE
    require(comparable, "drafter", ",".join(drafters), "one drafter with --k, under one rule, and not none")
    require(tuple(counts) == (None,), "num_draft_tokens", counts[0], "auto with --k, which gives the numbers")
    auto = SpeedSetting(drafters[0], SpeculationSettings(drafter=drafters[0].partition(":")[0]), rules[0])
    single = {drafter.rstrip("/").rpartition("/")[2]: _asking(auto, drafter=drafter) for drafter in alone}
    by_length = {
        f"{name} k={length}".strip(): _asking(setting, num_draft_tokens=length)
        for name, setting in {"": auto, **single}.items()
        for length in lengths
        if length
    }
    return beside_plain(drafters[0], {**by_length, **single, AUTO: auto})


def _asking(setting: SpeedSetting, **fields: object) -> SpeedSetting:
    return replace(setting, speculation=replace(setting.speculation, **fields))  # type: ignore[arg-type]


def drafters_of(drafter: str, model: str) -> tuple[str, ...]:
    """Return the drafters of services started for `--drafter`, as requests name them."""
    choice = DrafterChoice.parse(drafter)
    first, *others = choice.draft_models(model) or ("",)
    drafts = (MODEL, *(f"{MODEL}:{name}" for name in others)) if first else ()
    return (NGRAM, *drafts) if choice.kind == AUTO else drafts


def with_split(
    settings: Mapping[str, SpeedSetting], groups: Mapping[str, GenerationRunner]
) -> dict[str, SpeedSetting]:
    """Add target-only on every drafter's services that give the target other threads than our fastest."""
    threads = groups[settings[PLAIN].group].target_threads
    others = [name for name, group in groups.items() if group.target_threads != threads]
    split = {f"{PLAIN} beside {short_name(each)}": SpeedSetting(each, OFF) for each in others}
    return {**settings, **split}
