"""Sessions that follow grammars in workers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet

from paceline.grammars.pool import WorkerPool, settle
from paceline.grammars.wire import Frame
from paceline.protocol.errors import DeadlineExceeded
from paceline.protocol.sampling import Grammar
from paceline.sampling.grammar import token_refusal

Masks = list[bytes | None]
"""The allowed tokens after each path (`paceline.sampling.processors.Follower`)."""


class Grammars(WorkerPool):
    """Grammars over one tokenizer, followed by workers; may be called from any thread, and never blocks.

    Args:
        load: loads the tokenizer; called for the first grammar, on a thread of its own.
        settings: limits of grammars.
    """

    def open(self, grammar: Grammar, end_token_ids: Sequence[int], prompt_length: int) -> GrammarSession:
        """Begin to follow a grammar, from its start.

        Args:
            grammar: the grammar.
            end_token_ids: the session's end tokens, which must be the tokenizer's own.
            prompt_length: tokens that the grammar doesn't see.
        """
        return GrammarSession(self, grammar, end_token_ids, prompt_length)


class GrammarSession:
    """One session's state in a grammar, after its committed tokens.

    `compilation` is done once the grammar has compiled. It fails with

    - `InvalidInput`: the library refuses the grammar, it exceeds a limit, or the ends are not the tokenizer's own;
    - `Unsupported`: the library is not installed, or can't read the tokenizer;
    - `UnknownSession`, `Overloaded`: the worker was lost; another one can follow the grammar.
    """

    def __init__(self, pool: WorkerPool, grammar: Grammar, ends: Sequence[int], prompt_length: int) -> None:
        self._pool = pool
        self._grammar = grammar
        self._ends = ends
        self._prompt_left = prompt_length
        self._position = prompt_length
        self._id, self._worker = pool.join(grammar)
        self.compilation: Future[None] = Future()
        self._worker.compilation.add_done_callback(self._on_compiled)

    def ask(self, token_ids: Sequence[int], paths: Sequence[Sequence[int]]) -> Future[Masks]:
        """Append committed tokens, the prompt's first, and compute the allowed tokens after each path.

        Returns:
            The masks. It fails as `compilation` does, and with `InvalidInput` where the grammar forbids a committed
            token or takes too long.
        """
        prompt_tokens = min(self._prompt_left, len(token_ids))
        self._prompt_left -= prompt_tokens
        output, start = list(token_ids[prompt_tokens:]), self._position
        self._position += len(output)
        masks: Future[Masks] = Future()

        def on_answer(answer: Future[Frame]) -> None:
            try:
                settle(masks, self._masks(answer.result(), output, start))
            except Exception as error:  # noqa: BLE001  every error goes to the caller
                settle(masks, error)

        header = {"commit": output, "paths": [list(path) for path in paths]}
        self._pool.ask(self._worker, self._id, header).add_done_callback(on_answer)
        return masks

    def close(self) -> None:
        """Follow the grammar no further. Harmless when repeated."""
        self._pool.leave(self._worker, self._id)

    def _masks(self, answer: Frame, output: Sequence[int], start: int) -> Masks:
        header, payload = answer
        if header["taken"] < len(output):
            raise token_refusal(self._grammar, output[header["taken"]], start + header["taken"])
        reachable = header["reached"]
        size = len(payload) // max(1, sum(reachable))
        masks = iter([payload[place : place + size] for place in range(0, len(payload), size)] if size else [])
        return [next(masks) if each else None for each in reachable]

    def _on_compiled(self, compilation: Future[Frame]) -> None:
        try:
            compilation.result()
            assert self._pool.vocabulary is not None, "a compiled grammar has its vocabulary"
            self._pool.vocabulary.check_ends(self._ends)
        except Exception as error:  # noqa: BLE001  every error goes to the caller
            settle(self.compilation, error)
        else:
            settle(self.compilation, None)


class PrecomputedFollower:
    """A `Follower` whose masks are computed before they are needed."""

    def __init__(self) -> None:
        self.next_masks: Masks = []

    def commit(self, token_ids: Sequence[int]) -> int:
        """Accept all tokens: the worker has committed them already."""
        return len(token_ids)

    def masks(self, paths: Sequence[Sequence[int]]) -> Masks:
        """The masks that were computed for these paths."""
        assert len(paths) == len(self.next_masks), "the masks are of these paths"
        return self.next_masks


class BlockingFollower:
    """A `Follower` that waits for its masks.

    Args:
        session: the session, whose grammar has compiled.
        patience_s: how long it waits.
    """

    def __init__(self, session: GrammarSession, patience_s: float) -> None:
        self._session = session
        self._patience_s = patience_s
        self._committed: list[int] = []

    def commit(self, token_ids: Sequence[int]) -> int:
        """Accept all tokens; `masks` raises if the grammar forbids one."""
        self._committed += token_ids
        return len(token_ids)

    def masks(self, paths: Sequence[Sequence[int]]) -> Masks:
        """The allowed tokens after each path.

        Raises:
            DeadlineExceeded: no answer within `patience_s`.
            PacelineError: as `GrammarSession.ask`.
        """
        committed, self._committed = self._committed, []
        try:
            return self._session.ask(committed, paths).result(self._patience_s)
        except NotYet:
            raise DeadlineExceeded(f"grammar: no answer within {self._patience_s:g} s") from None
