"""Proposals that follow matches: in the text so far, in a prediction of it, or in other texts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.text.library import Volume
from paceline.protocol.proposal import MAX_PROPOSAL_NODES, ROOT, Outcome, Proposal, SparseDistribution
from paceline.protocol.target import Round
from paceline.sampling.match import LONGEST_MATCH, Match
from paceline.sampling.prediction import PredictedText
from paceline.sampling.suffix import FollowedText, SuffixAutomaton

Volumes = Callable[[], Sequence[Volume]]
"""Other texts that may be searched, as there are now."""


class Matches:
    """Finds matches of one request's text in itself, in the request's prediction, and in other texts.

    Args:
        prompt_tokens: of the text, behind which the prediction begins.
        prediction: of the output; empty: none.
        ngrams: whether the text is searched for matches of itself.
        volumes: other texts; None: none.
    """

    def __init__(
        self, prompt_tokens: int, prediction: Sequence[int], *, ngrams: bool, volumes: Volumes | None = None
    ) -> None:
        self._own = SuffixAutomaton() if ngrams else None
        self._prediction = PredictedText(prediction) if prediction else None
        self._volumes = volumes
        self._followed_texts: dict[Volume, FollowedText] = {}
        self._prompt_tokens = prompt_tokens
        self._length = 0
        self.best: Match | None = None
        """The match of highest score; of equals the prediction's, then the text's own."""

    @property
    def exist(self) -> bool:
        """Whether there may be any matches."""
        return self._own is not None or self._prediction is not None

    def extend(self, committed: Sequence[int]) -> None:
        """Search for matches of the text as it is now."""
        matches: list[Match | None] = []
        if self._prediction is not None:
            self._prediction.extend(committed[self._prompt_tokens + len(self._prediction) :])
            matches.append(self._prediction.match())
        if self._own is not None:
            self._own.extend(committed[len(self._own) :])
            matches.append(self._own.match(self._own.own_suffix()))
        if self._volumes is not None:
            self._follow(self._volumes(), committed)
            matches += [text.match() for text in self._followed_texts.values()]
        self._length = len(committed)
        self.best = max((match for match in matches if match is not None), key=Match.score, default=None)

    def rest(self) -> None:
        """Have no match until the next search, which makes up for what was not searched."""
        self.best = None

    def _follow(self, volumes: Sequence[Volume], committed: Sequence[int]) -> None:
        """Follow the new tokens in texts that were followed before, and the last tokens in new texts."""
        new, last = committed[self._length :], committed[-LONGEST_MATCH:]
        texts: dict[Volume, FollowedText] = {}
        for volume in volumes:
            text = self._followed_texts.get(volume)
            texts[volume] = text or FollowedText(volume.text, volume.drafter)
            texts[volume].extend(new if text else last)
        self._followed_texts = texts

    def proposal(self, proposal_id: int, k: int, width: int, *, coupled: bool) -> Proposal:
        """The best match's next k tokens, with as many other beginnings as `width` leaves room for."""
        assert self.best is not None, "asked for behind a match"
        paths = [self.best.continuation(k)]
        if self._own is not None and width > 1:
            paths = distinct_paths(self._own, self.best, k, width)
        return copied_proposal(proposal_id, paths, self.best.drafter, coupled=coupled)

    def prefetch_proposal(
        self, proposal_id: int, round_: Round, nodes_behind: Callable[[Match, int, Outcome], int]
    ) -> tuple[Outcome, Proposal] | None:
        """The match's continuation after a round, for the outcome that follows the match; None: there is none.

        Args:
            proposal_id: of the proposal.
            round_: in flight; without a proposal, or with one of a match.
            nodes_behind: how far to follow the match after k tokens and an outcome; 0: not at all.
        """
        best, proposed = self.best, round_.proposal.token_ids if round_.proposal else ()
        k = len(proposed)
        continuation = best.continuation(k + 1) if best is not None else ()
        is_chain = round_.proposal is None or round_.proposal.is_chain
        if best is None or len(continuation) <= k or continuation[:k] != proposed or not is_chain:
            return None
        outcome = Outcome(round_.base_length, k - 1, continuation[k])
        following = best.continuation(k + 1 + max(0, nodes_behind(best, k, outcome)))[k + 1 :]
        chances = (1.0,) * len(following)
        proposal = Proposal(proposal_id, following, chances, drafter=best.drafter)
        return (outcome, proposal) if following else None


def distinct_paths(text: SuffixAutomaton, best: Match, k: int, width: int) -> list[tuple[int, ...]]:
    """The best match's next k tokens and those of the text's other matches, up to `width` that begin differently."""
    paths = [best.continuation(k)]
    for path in text.paths(text.own_suffix(), width + 1, k):
        distinct = all(path[0] != other[0] for other in paths)
        if distinct and len(paths) < width and (len(paths) + 1) * k <= MAX_PROPOSAL_NODES:
            paths.append(path)
    return paths


def copied_proposal(proposal_id: int, paths: Sequence[Sequence[int]], drafter: str, *, coupled: bool) -> Proposal:
    """A proposal of paths that hang from the root, each of its tokens certain."""
    token_ids: list[int] = []
    parents: list[int] = []
    for path in paths:
        parents += (ROOT, *range(len(token_ids), len(token_ids) + len(path) - 1))
        token_ids += path
    supports = () if coupled else tuple(SparseDistribution((token,), (1.0,)) for token in token_ids)
    return Proposal(proposal_id, tuple(token_ids), (1.0,) * len(token_ids), tuple(parents), supports, drafter)
