"""Proposals that follow n-gram matches. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.protocol.proposal import MAX_PROPOSAL_NODES, NGRAM, ROOT, Proposal, SparseDistribution
from paceline.sampling.ngram import Match, NgramIndex


def distinct_paths(ngrams: NgramIndex, best: Match, k: int, width: int) -> list[tuple[int, ...]]:
    """The best match's next k tokens and those of other matches, up to `width` paths that begin differently."""
    paths = [best.continuation(k)]
    for path in ngrams.propose_many(width + 1, k):
        distinct = all(path[0] != other[0] for other in paths)
        if distinct and len(paths) < width and (len(paths) + 1) * k <= MAX_PROPOSAL_NODES:
            paths.append(path)
    return paths


def copied_proposal(proposal_id: int, paths: Sequence[Sequence[int]], *, coupled: bool) -> Proposal:
    """A proposal of paths that hang from the root, each of its tokens certain."""
    token_ids: list[int] = []
    parents: list[int] = []
    for path in paths:
        parents += (ROOT, *range(len(token_ids), len(token_ids) + len(path) - 1))
        token_ids += path
    supports = () if coupled else tuple(SparseDistribution((token,), (1.0,)) for token in token_ids)
    return Proposal(proposal_id, tuple(token_ids), (1.0,) * len(token_ids), tuple(parents), supports, NGRAM)
