"""lm-eval's `local-completions` on tasks of our own: what it finds is what it finds with transformers itself."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from paceline.models.resolve import pulled_path
from tests.compat.harness import HarnessReport, http_url, python_environment, python_versions, run, served

MODEL = "smollm2-135m"
PACKAGES = ("torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0", "lm_eval[api]==0.4.13")
TASKS_FOLDER = Path(__file__).parent / "tasks"
TEXTS = "paceline_answers"
TASKS = ("paceline_choices", TEXTS, "paceline_perplexity")
CLOSE = 1e-3
"""Of sums over up to 40 tokens of values that differ by 1e-5 or so."""
RUN_S = 200.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Evaluation:
    """What lm-eval found.

    Attributes:
        scores: by task and metric.
        answers: by task, document and request: a text, or a log-likelihood and perhaps whether it is the greedy one.
    """

    scores: Mapping[str, float]
    answers: Mapping[tuple[str, int, int], Any]


def lm_eval() -> list[HarnessReport]:
    """Both ways, and hold every answer of one against the other's."""
    programs = python_environment("lm-eval", *PACKAGES)
    folder = pulled_path(MODEL)
    with served(MODEL, drafter="ngram") as services:
        asked: dict[str, object] = {
            "model": MODEL,
            "base_url": f"{http_url(services)}/v1/completions",
            "num_concurrent": 2,
        }
        asked |= {"tokenizer_backend": "huggingface", "tokenizer": folder}
        ours = evaluated(programs / "lm_eval", "local-completions", asked)
    theirs = evaluated(programs / "lm_eval", "hf", {"pretrained": folder, "dtype": "float32"})
    commands = [f"lm_eval run --model {how} --tasks {','.join(TASKS)} …" for how in ("local-completions", "hf")]
    return [HarnessReport("lm-eval", "passed", python_versions(programs), commands, compare(ours, theirs))]


def evaluated(program: Path, model: str, arguments: Mapping[str, object]) -> Evaluation:
    """Run all tasks without network, data sets cached where they go away again."""
    words = ",".join(f"{name}={value}" for name, value in arguments.items())
    with TemporaryDirectory() as out:
        command = [
            *(program, "run", "--model", model, "--model_args", words, "--tasks", ",".join(TASKS), "--batch_size", 4),
            *("--include_path", TASKS_FOLDER, "--output_path", out, "--log_samples", "--device", "cpu"),
        ]
        run(command, RUN_S, cwd=TASKS_FOLDER, env=os.environ | OFFLINE | {"HF_HOME": f"{out}/cache"})
        (results,) = Path(out).rglob("results_*.json")
        scores = scores_of(json.loads(results.read_text())["results"])
        samples = {task: next(Path(out).rglob(f"samples_{task}_*.jsonl")).read_text() for task in TASKS}
    return Evaluation(scores, answers_of(samples))


def scores_of(results: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of each task, their errors left out."""
    return {
        f"{task} {metric.partition(',')[0]}": value
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if isinstance(value, float) and "stderr" not in metric
    }


def answers_of(samples: Mapping[str, str]) -> dict[tuple[str, int, int], Any]:
    """Answers in lm-eval's lines of samples, which are text there."""
    answers = {}
    for task, lines in samples.items():
        for line in map(json.loads, lines.splitlines()):
            for number, (answer,) in enumerate(line["resps"]):
                answers[task, line["doc_id"], number] = answer if task == TEXTS else likelihood(answer)
    return answers


def likelihood(answer: str | Sequence[str]) -> tuple[float, Sequence[str]]:
    """It comes alone, or with whether it is the greedy one."""
    value, *greedy = [answer] if isinstance(answer, str) else answer
    return float(value), greedy


def compare(ours: Evaluation, theirs: Evaluation) -> Sequence[str]:
    """Every answer, then the scores that come of them."""
    assert ours.answers.keys() == theirs.answers.keys(), "the same requests"
    for place, answer in ours.answers.items():
        assert same(answer, theirs.answers[place]), f"{place}: {answer!r} instead of {theirs.answers[place]!r}"
    assert ours.scores.keys() == theirs.scores.keys() != set(), "the same metrics"
    for name, score in ours.scores.items():
        assert abs(score - theirs.scores[name]) <= CLOSE, f"{name}: {score} instead of {theirs.scores[name]}"
    counts = [
        f"{task}: {sum(place[0] == task for place in ours.answers)} answers, as with transformers" for task in TASKS
    ]
    return [*counts, *(f"{name} {score:.4f}" for name, score in ours.scores.items())]


def same(answer: Any, wanted: Any) -> bool:
    """A text exactly; a log-likelihood as far as sums in float32 go."""
    if isinstance(answer, str):
        return bool(answer == wanted)
    (value, greedy), (wanted_value, wanted_greedy) = answer, wanted
    return bool(abs(value - wanted_value) <= CLOSE and greedy == wanted_greedy)
