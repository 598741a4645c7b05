"""Verification by drawing, in an SGLang that is restated: one text with drafts and without, and its distribution."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from paceline.protocol.proposal import ROOT, Proposal
from paceline_sglang.trees import DraftedTrees, pack
from tests.services.harness import LAW, SPEC
from tests.sglang import restated
from tests.sglang.restated import SamplingParams
from tests.sglang.server import Req, Server, worker_of

NODES = 9
CHAINS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.1, "top_k": 5},
    "top-p": {"temperature": 0.9, "top_p": 0.8},
    "min-p": {"temperature": 1.3, "min_p": 0.08},
    "all": {"temperature": 1.2, "top_k": 9, "top_p": 0.7, "min_p": 0.05},
    "greedy": {"temperature": 0},
}


@dataclass
class Scripted:
    """A client whose drafts are trees of likely tokens, of others, or none."""

    draws: random.Random
    accepted: int = 0
    texts: list[list[int]] = field(default_factory=list)

    def open(self, token_ids: Sequence[int], prompt_length: int) -> Any:
        self.texts.append([*token_ids])
        return SimpleNamespace(text=self.texts[-1], length=len(token_ids), proposal=None)

    def end(self, request: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def step(self, committed: Sequence[tuple[Any, Sequence[int]]]) -> list[list[int]]:
        for request, tokens in committed:
            request.text += tokens
            request.length += len(tokens)
            self.accepted += max(0, len(tokens) - 1)
            request.proposal = self.tree(request.text)
        return [[*request.proposal.token_ids] for request, _ in committed]

    def tree(self, text: Sequence[int]) -> Proposal:
        tokens: list[int] = []
        parents: list[int] = []
        paths = [[*text]]
        for node in range(self.draws.randint(0, restated.SPEC.speculative_num_draft_tokens - 1)):
            parent = self.draws.randint(max(ROOT, node - 4), node - 1)
            likely = np.argsort(LAW.logits(paths[parent + 1]))[-4:]
            tokens.append(
                int(self.draws.choice(likely)) if self.draws.random() < 0.8 else self.draws.randrange(SPEC.vocab)
            )
            parents.append(parent)
            paths.append([*paths[parent + 1], tokens[-1]])
        return Proposal(1, tuple(tokens), (1.0,) * len(tokens), tuple(parents))


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restated.SPEC, "speculative_num_draft_tokens", NODES)


def served(requests: Sequence[tuple[Sequence[int], SamplingParams]], tokens: int, client: Any) -> list[list[int]]:
    with worker_of() as worker:
        worker.ngram_corpus.drafts.client.close()
        worker.ngram_corpus = DraftedTrees(client, NODES)
        return run(Server(worker), requests, tokens)


def run(server: Server, requests: Sequence[tuple[Sequence[int], SamplingParams]], tokens: int) -> list[list[int]]:
    for number, (prompt, params) in enumerate(requests):
        server.admit(str(number), prompt, params)
    while any(len(req.text) < len(req.origin_input_ids_unpadded) + tokens for req in server.reqs):
        server.step()
    return [req.text[: len(req.origin_input_ids_unpadded) + tokens] for req in server.reqs]


@pytest.mark.parametrize("rows", [2_000, pytest.param(10_000, marks=pytest.mark.full)])
def test_so_many_rows_are_one_text_with_drafts_and_without(rows: int) -> None:
    """Greedy and drawn requests in one batch, of all filters."""
    chains = [*CHAINS.values()]
    requests = [
        ((number % SPEC.vocab, 3), SamplingParams(**chains[number % len(chains)], sampling_seed=number << 31))
        for number in range(70)
    ]
    tokens = rows // len(requests) + 1
    client = Scripted(random.Random(1))
    texts = served(requests, tokens, client)
    assert texts == run(Server(), requests, tokens)
    assert client.accepted > rows / 10
    assert texts == served(requests, tokens, None), "nor do they depend on whether there are drafts at all"


def law(text: Sequence[int], chain: dict[str, Any]) -> NDArray[np.float64]:
    """The probabilities of the next token by a request's filters: a reference of its own."""
    logits = LAW.logits(text).astype(float)
    if chain.get("temperature", 1) == 0:
        return np.asarray(np.eye(len(logits))[logits.argmax()])
    p = np.exp(logits / chain.get("temperature", 1.0))
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    keeps = (np.arange(len(p)) < chain.get("top_k", len(p))) & (before <= chain.get("top_p", 1.0))
    keeps &= p[order] >= p.max() * chain.get("min_p", 0.0)
    kept = np.zeros_like(p)
    kept[order[keeps]] = p[order[keeps]]
    return np.asarray(kept / kept.sum())


def check_draws(tokens: Sequence[int], p: NDArray[np.float64]) -> None:
    counts = Counter(tokens)
    assert set(counts) <= set(np.flatnonzero(p).tolist()), "no token that the filters leave out"
    often = [int(each) for each in np.flatnonzero(p) if p[each] * len(tokens) >= 5]
    seen, expected = [counts[each] for each in often], [p[each] * len(tokens) for each in often]
    rest = len(tokens) - sum(seen), len(tokens) - sum(expected)
    if rest[1] > 1e-6:
        seen, expected = [*seen, rest[0]], [*expected, rest[1]]
    if len(seen) > 1:
        assert stats.chisquare(seen, np.array(expected) * sum(seen) / sum(expected)).pvalue > 1e-4


WITHOUT_SEEDS = [pytest.param(name, False, marks=() if name == "all" else pytest.mark.full) for name in CHAINS]


@pytest.mark.parametrize(("name", "has_seeds"), [*((name, True) for name in CHAINS), *WITHOUT_SEEDS])
def test_drawn_tokens_have_the_targets_distribution(
    monkeypatch: pytest.MonkeyPatch, name: str, has_seeds: bool
) -> None:
    """The token behind the last one, and the one behind a drafted token that was accepted."""
    torch.manual_seed(5)
    text, rows, chain, nodes = [4, 9], 2000, CHAINS[name], 4
    monkeypatch.setattr(restated.SPEC, "speculative_num_draft_tokens", nodes)
    likely = int(law(text, chain).argmax())
    proposal = Proposal(1, (likely, 7, 11), (1.0,) * 3, (ROOT, ROOT, 0))
    client = Scripted(random.Random(0))
    client.tree = lambda text: proposal  # type: ignore[method-assign]
    with worker_of() as worker:
        worker.ngram_corpus.drafts.client.close()
        worker.ngram_corpus = DraftedTrees(client, nodes)  # type: ignore[arg-type]
        server = Server(worker)
        for number in range(rows):
            params = SamplingParams(**chain, sampling_seed=number if has_seeds else None)
            server.reqs.append(Req(str(number), array("q", text[:1]), params, [*text], accepted=text[1:]))
        server.step()
    drawn = [req.text[len(text) :] for req in server.reqs]
    check_draws([each[0] for each in drawn], law(text, chain))
    behind = [each[1] for each in drawn if each[0] == likely]
    assert len(behind) > 100
    check_draws(behind, law([*text, likely], chain))


def test_nodes_that_fill_a_tree_up_are_reached_by_no_path() -> None:
    """Not even where the target says the token that they have."""
    proposal = Proposal(1, (5, 6, 7), (1.0,) * 3, (ROOT, ROOT, 0))
    ids, mask = pack([1, 2], [proposal, None], 6)
    assert ids.tolist() == [1, 5, 6, 7, 0, 0, 2, 0, 0, 0, 0, 0]
    depths, children, siblings = restated.reconstruct_indices_from_tree_mask(mask, 2, 6)
    assert depths.tolist() == [[0, 1, 1, 2, 0, 0], [0] * 6]
    assert children.tolist() == [[1, 3, -1, -1, -1, -1], [-1] * 6]
    assert siblings.tolist() == [[-1, 2, -1, -1, -1, -1], [-1] * 6]


def verified(params: Sequence[SamplingParams], proposal: Proposal | None, **changes: Any) -> Any:
    """What one step of requests behind (4, 9) accepts, and its logits."""
    from paceline_sglang.verification import verify_by_drawing

    rows = len(params)
    ids, mask = pack([9] * rows, [proposal] * rows, NODES)
    depths, children, siblings = restated.reconstruct_indices_from_tree_mask(mask, rows, NODES)
    tree = SimpleNamespace(
        draft_token=torch.from_numpy(ids),
        draft_token_num=NODES,
        max_tree_depth=NODES,
        tree_topk=-1,
        positions=torch.from_numpy(depths).reshape(-1) + 1,
        retrieve_index=torch.arange(rows * NODES).reshape(rows, NODES),
        retrieve_next_token=torch.from_numpy(children),
        retrieve_next_sibling=torch.from_numpy(siblings),
    )
    info = restated.SamplingBatchInfo(params, changes.pop("logit_bias", None))
    vars(info).update(changes.pop("info", {}))
    batch = SimpleNamespace(
        reqs=[None] * rows,
        sampling_info=info,
        forward_mode=SimpleNamespace(is_idle=lambda: False),
        return_logprob=True,
    )
    logits = torch.tensor(LAW.logits([4, 9])).repeat(rows * NODES, 1)
    output = SimpleNamespace(next_token_logits=logits)
    runner = SimpleNamespace(sampler=changes.pop("sampler", restated.Sampler()))
    predict, lengths, index = verify_by_drawing(runner, restated.eagle_sample, tree, batch, output, **changes)
    return predict[index.long()], lengths, output.next_token_logits


def test_biases_and_grammars_are_of_every_node() -> None:
    params = [SamplingParams(sampling_seed=each) for each in range(20)]
    only = torch.full((1, SPEC.vocab), -torch.inf)
    only[0, [6, 7]] = 0.0
    chain = Proposal(1, (6, 6, 6), (1.0,) * 3)
    tokens, lengths, logits = verified(params, chain, logit_bias=only)
    seen = {int(each) for row, length in zip(tokens, lengths, strict=True) for each in row[:length]}
    assert seen == {6, 7}
    assert lengths.max() > 1
    assert torch.isinf(logits).sum() == len(logits) * (SPEC.vocab - 2), "probabilities are told of the biased ones"

    class Mask:
        def apply(self, logits: torch.Tensor) -> None:
            logits[:, 8:] = -torch.inf

    tokens, lengths, _ = verified(params, chain, grammar_mask=Mask())
    assert max(int(row[:length].max()) for row, length in zip(tokens, lengths, strict=True)) < 8
    info = {"has_custom_logit_processor": True, "forbidden": [*range(6), *range(7, SPEC.vocab)]}
    for each in (params, [SamplingParams(temperature=0)] * 2):
        tokens, lengths, _ = verified(each, chain, info=dict(info))
        assert (lengths == 4).all(), "what a custom processor leaves is all there is"
        assert (tokens[:, :4] == 6).all()


def test_greedy_requests_among_others_say_their_first_choice() -> None:
    """Whatever a sampler makes of two that are as likely."""
    params = [SamplingParams(temperature=0), SamplingParams()]
    tokens, lengths, _ = verified(
        params, None, sampler=lambda *values: torch.full((2 * NODES,), 3, dtype=torch.int32)
    )
    assert lengths.tolist() == [1, 1]
    assert tokens[:, 0].tolist() == [int(LAW.logits([4, 9]).argmax()), 3]


def test_steps_in_which_nothing_is_drawn_are_sglangs_own() -> None:
    tokens, lengths, logits = verified([SamplingParams(temperature=0)] * 3, None)
    assert lengths.tolist() == [1, 1, 1]
    assert set(tokens[:, 0].tolist()) == {int(LAW.logits([4, 9]).argmax())}
    assert torch.equal(logits[0], torch.tensor(LAW.logits([4, 9])))
