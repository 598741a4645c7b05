"""Measuring what a target's and a draft's steps take, by threads: each model in a process of its own, loaded once."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from paceline.costs.cost_line import CostLine
from paceline.local.cores import OUTCOME_ROWS, Cores, MeasuredDivision
from paceline.local.machine_use import UseByOthers
from paceline.local.service_process import inherited_environment, thread_environment
from paceline.local.services import START_SECONDS
from paceline.protocol.errors import PacelineError

LONGEST_S = START_SECONDS
"""Time that measuring may take, loading included: as long as services get to load."""
PASSES = 3
"""Times that everything is measured, apart in time: another program's burst spoils one."""
SECONDS = 0.2
"""Time that steps of one kind are measured for in each pass; slow ones are run three times."""
STEPS_TOGETHER = 4
"""Of the slower model while both work: fewer would weigh their beginning and end."""
OTHERS_SHARE = 0.1
"""Of the cores, used by other programs meanwhile: more moves a step by more than divisions that are alike differ."""
TARGET_ROWS = 5
"""Rows of the second point of a target's line: a round of four tokens."""


class MeasuringFailed(PacelineError):
    """Steps could not be measured; the message has the reason."""


class StepMeter:
    """A process that times one model's steps (`paceline.engine.step_times`).

    Args:
        name: what is measured: `target` or `draft`.
        config_file: the service's configuration.
        threads: the most that will be asked for.
    """

    def __init__(self, name: str, config_file: Path, threads: int) -> None:
        self.name = name
        self._log_file = config_file.with_suffix(".log")
        with self._log_file.open("wb") as log:
            self._child = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
                [sys.executable, "-m", f"{name}_service.step_times", "--config", str(config_file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=inherited_environment() | thread_environment(threads),
                process_group=0,
                text=True,
            )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.pid

    def ask(self, threads: int, rows: int, seconds: float = SECONDS) -> None:
        """Have steps measured; `answer` has what they take."""
        assert self._child.stdin is not None, "opened"
        try:
            self._child.stdin.write(json.dumps({"threads": threads, "rows": rows, "seconds": seconds}) + "\n")
            self._child.stdin.flush()
        except OSError:
            raise self._failure() from None

    def answer(self) -> float:
        """Milliseconds of the steps that were asked for; the first answer comes once the model is loaded.

        Raises:
            MeasuringFailed: the process has ended.
        """
        assert self._child.stdout is not None, "opened"
        line = self._child.stdout.readline()
        if not line.endswith("\n"):
            raise self._failure()
        return float(json.loads(line)["ms"])

    def alone_ms(self, threads: int, rows: int) -> float:
        """Milliseconds of a step of so many rows."""
        self.ask(threads, rows)
        return self.answer()

    def kill(self) -> None:
        """End the process; whoever waits for an answer gets `MeasuringFailed`."""
        self._child.kill()

    def close(self) -> None:
        """End the process; returns when its memory is free."""
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError):  # what could not be written any more
                pipe.close()  # type: ignore[union-attr]  # both were asked for

    def _failure(self) -> MeasuringFailed:
        self._child.kill()
        self._child.wait()
        logged = self._log_file.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(logged) if line.strip()), "no line in its log")
        return MeasuringFailed(f"the {self.name}'s steps could not be measured: {last}")


@contextlib.contextmanager
def open_meters(target_config: Path, draft_config: Path, threads: int) -> Iterator[tuple[StepMeter, StepMeter]]:
    """Both models' meters, which load at the same time; both are ended after `LONGEST_S`."""
    with contextlib.ExitStack() as stack:
        meters: list[StepMeter] = []
        for name, file in (("target", target_config), ("draft", draft_config)):
            meters.append(StepMeter(name, file, threads))
            stack.callback(meters[-1].close)
        overdue = threading.Timer(LONGEST_S, _kill, meters)
        overdue.start()
        stack.callback(overdue.cancel)
        yield meters[0], meters[1]


def _kill(*meters: StepMeter) -> None:
    for meter in meters:
        meter.kill()


def measure(target: StepMeter, draft: StepMeter, divisions: tuple[Cores, ...]) -> tuple[MeasuredDivision, ...]:
    """What steps take in each division: each model alone, then both at once.

    Raises:
        MeasuringFailed: naming the model and the last line of its log, or what else used the cores.
    """
    for meter in (target, draft):
        meter.answer()
    least, others = _Least(), UseByOthers((target.pid, draft.pid))
    for _ in range(PASSES):
        for threads in {each.target for each in divisions}:
            for rows in (1, TARGET_ROWS):
                least.add(("target", threads, rows), target.alone_ms(threads, rows))
        for threads in {each.draft for each in divisions}:
            for rows in (1, OUTCOME_ROWS):
                least.add(("draft", threads, rows), draft.alone_ms(threads, rows))
        for cores in divisions:
            both = _together(target, draft, cores, least)
            least.add(("target beside", cores), both[0])
            least.add(("draft beside", cores), both[1])
    share = others.share()
    if share > OTHERS_SHARE:
        raise MeasuringFailed(f"other programs used {share:.0%} of the cores while steps were measured")
    return tuple(least.division(cores) for cores in divisions)


def _together(target: StepMeter, draft: StepMeter, cores: Cores, least: _Least) -> tuple[float, float]:
    """Milliseconds of both models' steps while both work."""
    slower = max(least.ms["target", cores.target, TARGET_ROWS], least.ms["draft", cores.draft, OUTCOME_ROWS])
    seconds = max(SECONDS, STEPS_TOGETHER * slower / 1000)
    target.ask(cores.target, TARGET_ROWS, seconds)
    draft.ask(cores.draft, OUTCOME_ROWS, seconds)
    return target.answer(), draft.answer()


class _Least:
    """The least time of each kind of step: what others do on the machine only ever adds."""

    def __init__(self) -> None:
        self.ms: dict[tuple[object, ...], float] = {}

    def add(self, kind: tuple[object, ...], ms: float) -> None:
        """Take in another measurement."""
        self.ms[kind] = min(ms, self.ms.get(kind, ms))

    def division(self, cores: Cores) -> MeasuredDivision:
        """What was found for one division."""
        target = self._line("target", cores.target, TARGET_ROWS)
        draft = self._line("draft", cores.draft, OUTCOME_ROWS)
        slowdowns = (
            max(1.0, self.ms["target beside", cores] / target.ms(TARGET_ROWS)),
            max(1.0, self.ms["draft beside", cores] / draft.ms(OUTCOME_ROWS)),
        )
        return MeasuredDivision(cores, target, draft, *slowdowns)

    def _line(self, model: str, threads: int, rows: int) -> CostLine:
        one, more = self.ms[model, threads, 1], self.ms[model, threads, rows]
        return CostLine(((1, one), (rows, max(one, more))))
