"""What a target refuses: sessions and rounds outside its limits, and a repeated round that is another one."""

from __future__ import annotations

from paceline.engine.interface import EngineInfo
from paceline.protocol.errors import PrefixMismatch, Unsupported, require, require_ids
from paceline.protocol.features import FeatureRequest
from paceline.protocol.proposal import Acceptance, Proposal
from paceline.protocol.target import Round, TargetOpen
from paceline.sampling import processors


def check_open(command: TargetOpen, info: EngineInfo) -> None:
    """Refuse a session that could never be served.

    Raises:
        InvalidInput: a token id outside the vocabulary, or a session longer than context or KV budget.
        Unsupported: it asks for hidden states that the engine does not have.
    """
    facts = command.spec
    if command.features is not None:
        _check_features(command.features, info)
    limit = info.longest_session
    length = max(len(facts.token_ids), facts.max_length)
    require(length <= limit, "session length", length, f"at most {limit}, the context as far as KV holds it")
    vocab_size = info.fingerprint.vocab_size
    require_ids("token_ids", facts.token_ids, vocab_size)
    processors.check_ids(facts.sampling, facts.end_token_ids, vocab_size)


def _check_features(request: FeatureRequest, info: EngineInfo) -> None:
    if info.features is None:
        raise Unsupported(f"feature layers = {list(request.need.layers)}: this target sends no hidden states")
    info.features.check(request.need)


def check_round(round_: Round, acceptance: Acceptance, info: EngineInfo, max_rows: int) -> None:
    """Check ids, lengths and the proposal of a round.

    Raises:
        InvalidInput: naming field, value and limit.
    """
    vocab_size = info.fingerprint.vocab_size
    require_ids("committed token_ids", round_.committed, vocab_size)
    proposal = round_.proposal
    depth = max(proposal.depths, default=0) if proposal else 0
    length = round_.first_position + depth
    require(length <= info.max_length, "sequence length", length, f"at most {info.max_length}, the context")
    rows = round_.first_position + (len(proposal) if proposal else 0)
    require(rows <= max_rows, "KV rows of the session", rows, f"at most {max_rows}")
    if proposal is not None:
        proposal.check_for(acceptance, vocab_size)
    is_kept = not round_.has_mixed_lease or acceptance is Acceptance.COUPLED
    require(is_kept, "lease", round_.lease, "0 while a draft works, but for coupled acceptance")


def require_same(earlier: Round, repeat: Round, state: str) -> None:
    """Check that a repeated round is the same in all that draws depend on.

    It may differ in trace context, in lease, in whether a draft works, in its proposal's drafter and, under coupled
    acceptance, in its proposal's probabilities.

    Raises:
        PrefixMismatch: naming the first field that differs.
    """
    for name in ("base_length", "accepted_node", "committed", "proposal"):
        old_fact, new_fact = getattr(earlier, name), getattr(repeat, name)
        if _draw_inputs(old_fact) != _draw_inputs(new_fact):
            raise PrefixMismatch(
                f"session {earlier.session_id} {name}: expected {old_fact}, got {new_fact} "
                f"(the round at base length {earlier.base_length} {state})",
                metadata={"field": name, "expected": str(old_fact), "got": str(new_fact)},
            )


def _draw_inputs(fact: object) -> object:
    if not isinstance(fact, Proposal):
        return fact
    return fact.token_ids, fact.parents, fact.supports, fact.draft_probabilities if fact.supports else ()
