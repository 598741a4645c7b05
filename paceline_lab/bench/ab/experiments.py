"""What `paceline bench ab` compares; each experiment's docstring is its question."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import resources
from itertools import product

from paceline.protocol.errors import require
from paceline.protocol.generation import ChatMessage, GenerateRequest, SpeculationSettings
from paceline.protocol.proposal import AUTO, NGRAM
from paceline.protocol.sampling import SamplingParams
from paceline.runtime.config import DEFAULT_MODEL
from paceline_lab.bench.ab.arms import Arm, ArmServices, Case, Stage
from paceline_lab.bench.ab.span_sink import span_sink
from paceline_lab.bench.prompts import load_prompts
from paceline_lab.bench.simulated_pair import OFF, SimulatedPair, drafted, request

K = 4
PAIR = SimulatedPair("distribution=middling", 11.45, 2.0)
"""A step of a large model on a GPU, and one of its draft."""
DRAFT_OF_ACCEPTANCE = {
    0.8: "distribution=middling,disturb=0.663",
    0.9: "distribution=close,disturb=0.316",
}
"""Drafts whose coupled match at temperature 1 is the key: a named distribution with another `disturb`.

Each `disturb` is the root, to three digits, of that match less the key (`tests/lab/test_distributions.py`)."""
ANSWER = "Answer with the whole file in one code block and with nothing else."


@dataclass(frozen=True)
class AbOptions:
    """Options of a run: the target where it is a real model, users at once, and the most tokens of an answer."""

    model: str = DEFAULT_MODEL
    users: tuple[int, ...] = ()
    tokens: int = 128

    def __post_init__(self) -> None:
        require(self.tokens >= 2, "tokens", self.tokens, "at least 2, to have a time per token")
        for count in self.users:
            require(count >= 1, "users", count, "at least 1")

    def waves(self, usual: tuple[int, ...], speculation: SpeculationSettings) -> list[Case]:
        """Return requests to simulated models, the same in every turn, for each number of users."""
        waves = [[request(one, self.tokens, speculation) for one in range(users)] for users in self.users or usual]
        return [Case(f"{len(wave)} at once", [wave]) for wave in waves]

    def prompts(self, *kinds: str) -> list[Case]:
        """Return greedy requests with prompts of each kind, others in each turn, for each number of users."""

        def turns(kind: str, users: int) -> list[list[GenerateRequest]]:
            pool = [prompt.request(self.tokens) for prompt in load_prompts([kind])[kind]]
            return [[pool[(turn * users + one) % len(pool)] for one in range(users)] for turn in range(len(pool))]

        return [Case(f"{kind}, {each} at once", turns(kind, each)) for kind in kinds for each in self.users or (1,)]


def services_of(pair: SimulatedPair, label: str = "services", fan_out: int = K) -> ArmServices:
    """Return a simulated pair's services."""
    return ArmServices(pair.target, pair.drafter, label, {"fan_out": fan_out})


def http(options: AbOptions, stack: ExitStack) -> Iterator[Stage]:
    """what streamed completions through the gateway cost beside gRPC, on a simulated pair."""
    services = replace(services_of(PAIR), opens_http=True)
    arms = Arm("gRPC", services), Arm("HTTP", services, over_http=True)
    for mode, speculation in {"target-only": OFF, f"drafts of {K}": drafted(K)}.items():
        yield Stage(mode, arms, options.waves((1, 64), speculation))


def tracing(options: AbOptions, stack: ExitStack) -> Iterator[Stage]:
    """what tracing every request costs beside the same services without an exporter, on a simulated pair."""
    off = replace(services_of(PAIR), environment={"OTEL_SDK_DISABLED": "true"})
    # Exported five times a second, so that the export falls into the run that made the spans.
    export = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{stack.enter_context(span_sink())}"}
    tracer = replace(off, label="traced", environment={"OTEL_BSP_SCHEDULE_DELAY": "200", **export})
    arms = Arm("off", off), Arm("traced", tracer)
    yield Stage("every request", arms, options.waves((1, 8, 32), drafted(K)), apart=True)


def overlap(options: AbOptions, stack: ExitStack) -> Iterator[Stage]:
    """what drafting during verification brings over drafting after it, on simulated pairs."""
    for verify_ms, acceptance, share in product((30.0, 11.45), DRAFT_OF_ACCEPTANCE, (0.5, 1.0)):
        pair = SimulatedPair(DRAFT_OF_ACCEPTANCE[acceptance], verify_ms, share * verify_ms / K)
        name = f"acceptance {acceptance:g}, T_verify {verify_ms:g} ms, k · T_draft {share * verify_ms:g} ms"
        arms = Arm("after", services_of(pair, "after", 0)), Arm("during", services_of(pair, "during"))
        yield Stage(name, arms, options.waves((1,), drafted(K)))


def efficiency(options: AbOptions, stack: ExitStack) -> Iterator[Stage]:
    """how near drafting during verification comes to its ideal, with steps as long as the best published system's."""
    for verify_ms, draft in product((11.45, 30.0), ("close", "middling")):
        services = services_of(SimulatedPair(f"distribution={draft}", verify_ms, 2.54))
        yield Stage(f"{draft}, T_verify {verify_ms:g} ms", [Arm("during", services)], options.waves((1,), drafted(K)))


def fresh(options: AbOptions, stack: ExitStack) -> Iterator[Stage]:
    """how the first request of fresh services does under `auto`, beside settled ones and target-only."""
    services, auto = ArmServices(options.model), drafted(None)
    later = Arm("settled", services, auto)
    arms = Arm("target-only", services, OFF), later, replace(later, name="fresh", starts_anew=True)
    yield Stage("real model", arms, options.prompts("code", "sql", "chat"))


def edits(options: AbOptions, stack: ExitStack) -> Iterator[Stage]:
    """what a predicted output brings on edits of files, whose text stands in every arm's prompt."""
    services, ngram, auto = ArmServices(options.model), SpeculationSettings(drafter=NGRAM), drafted(None)
    arms = (
        Arm("target-only", services, OFF, predicts=False),
        Arm("n-gram", services, ngram, predicts=False),
        Arm("prediction", services, ngram),
        Arm(AUTO, services, auto, predicts=False),
        Arm(f"{AUTO} with prediction", services, auto),
    )
    lines = resources.files(__package__).joinpath("edits.jsonl").read_text().splitlines()
    yield Stage("real model", arms, [Case("a file a turn", [[_edit(json.loads(line), options)] for line in lines])])


def _edit(task: Mapping[str, str], options: AbOptions) -> GenerateRequest:
    text = f"{task['request']} {ANSWER}\n\n```{task['language']}\n{task['file']}\n```"
    return GenerateRequest(
        messages=(ChatMessage("user", text),),
        sampling=SamplingParams(temperature=0).with_defaults(),
        seed=0,
        max_new_tokens=options.tokens,
        prediction_text=task["file"],
    )


def drafting(options: AbOptions, stack: ExitStack) -> Iterator[Stage]:
    """`auto` beside target-only on a real model; with `--against`, beside another commit's `auto`."""
    services = ArmServices(options.model)
    arms = Arm("target-only", services, OFF), Arm(AUTO, services, drafted(None))
    yield Stage("real model", arms, options.prompts("code-edit", "chat"))


EXPERIMENTS: Mapping[str, Callable[[AbOptions, ExitStack], Iterator[Stage]]] = {
    each.__name__: each for each in (http, tracing, overlap, efficiency, fresh, edits, drafting)
}
SETTLING = {"fresh": 3}
"""Warm-up turns of an experiment for which one is too few: the planner has to know its drafts."""
