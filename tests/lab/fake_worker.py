"""A peer's worker that behaves as it is told: `fake_worker.py plain|speculates|changes|crashes|hangs|mute|noise`.

It answers `n` tokens that depend on each prompt alone, in n target steps, or n / 4 when it speculates.
"""

from __future__ import annotations

import json
import sys
import threading

behaviour = sys.argv[1]


def say(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if behaviour == "mute":
    threading.Event().wait()
if behaviour == "noise":
    sys.stdout.write("INFO loading\n")
    sys.stdout.flush()
say({"ready": {"version": "1.0"}})
requests = 0
for line in sys.stdin:
    request, requests = json.loads(line), requests + 1
    if behaviour == "crashes" and requests > 2:
        sys.stderr.write("out of memory\n")
        sys.exit(3)
    if behaviour == "hangs" and requests > 2:
        threading.Event().wait()
    if behaviour == "refuses":
        say({"error": "ValueError: no such prompt"})
        continue
    length = request["max_tokens"]
    texts = [[(prompt[-1] + place) % 200 for place in range(length)] for prompt in request["prompts"]]
    if behaviour == "changes":
        for text in texts:
            text[3] = 255
    quick = behaviour in ("speculates", "changes")
    steps = len(texts) * (length // 4 if quick else length)
    say({"texts": texts, "wall_s": 0.5 if quick else 1.0, "target_steps": steps})
