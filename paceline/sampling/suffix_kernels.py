"""The compiled loops of a suffix automaton: growth by a token, and steps along its edges.

A suffix automaton (Blumer et al. 1985) has a state for each set of strings that end at the same places of a text. It
has at most two states and three edges a token, and grows by a token in constant time, amortised. Here each state also
knows how often its strings occur and where one did last.

The arrays, all int32 and grown by their owner (`paceline.sampling.suffix`):
    states [S, 5]: by the columns below.
    edges [E, 4]: of all states; those of one state are chained.
    table [a power of two]: open addressing from (state, token) to 1 + the edge's index; 0: free.
    head [4]: states, edges, the state of the whole text, its tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paceline.runtime.compiled import compiled

Array = npt.NDArray[np.int32]
Shares = npt.NDArray[np.float32]

LENGTH, LINK, COUNT, LATEST, EDGES = range(5)
"""Columns of a state: tokens of its longest string; state of the longest suffix that ends elsewhere, too (-1: the
root); times that its strings occur; tokens of the text up to the last time; its first edge (-1: none)."""
TOKEN, TO, FROM, NEXT = range(4)
"""Columns of an edge: its token and states, and the next edge of the same state (-1: none)."""
STATES, EDGE_COUNT, WHOLE, TOKENS = range(4)
"""Columns of the head."""
COUNTED = 64
"""Suffixes, the longest first, that are counted with each token. Usual texts have fewer to count; one that repeats
itself without end has one more for each token, and its shorter suffixes go on as the longer ones do."""
COMPARED = 64
"""Continuations of one place that are compared."""
ESCAPE = 0.5
"""Times of a continuation that wasn't seen yet, for each kind that was (prediction by partial matching, method D).
It takes 0.3 % off the time of replayed texts beside plain frequencies (docs/decisions)."""
NO_TOKEN = -1
"""Stands between texts: no text has it, so no match goes on past it."""


@compiled
def slot_of(table: Array, edges: Array, state: int, token: int) -> int:
    """Where the table has an edge, or would have it."""
    mask = table.shape[0] - 1
    slot = (state * 0x9E3779B1 ^ token * 0x85EBCA6B) >> 7 & mask
    while table[slot] != 0:
        edge = table[slot] - 1
        if edges[edge, FROM] == state and edges[edge, TOKEN] == token:
            break
        slot = (slot + 1) & mask
    return int(slot)


@compiled
def step(table: Array, edges: Array, state: int, token: int) -> int:
    """The state behind a token; -1: the text has never gone on so."""
    found = table[slot_of(table, edges, state, token)]
    return int(edges[found - 1, TO]) if found else -1


@compiled
def add_edge(states: Array, edges: Array, table: Array, head: Array, state: int, token: int, to: int) -> None:
    """A state goes on with a token for the first time."""
    edge = head[EDGE_COUNT]
    head[EDGE_COUNT] += 1
    edges[edge, TOKEN], edges[edge, TO], edges[edge, FROM] = token, to, state
    edges[edge, NEXT] = states[state, EDGES]
    states[state, EDGES] = edge
    table[slot_of(table, edges, state, token)] = edge + 1


@compiled
def add_state(states: Array, head: Array, length: int) -> int:
    """A state whose longest string has so many tokens."""
    state = int(head[STATES])
    head[STATES] += 1
    states[state, LENGTH], states[state, LINK], states[state, EDGES] = length, -1, -1
    states[state, COUNT] = states[state, LATEST] = 0
    return state


@compiled
def split(states: Array, edges: Array, table: Array, head: Array, state: int, above: int, token: int) -> int:
    """Part the shorter strings of a state, which ended again, from its longer ones; returns the shorter ones' state.

    `above` with the token leads to the longest of the shorter ones.
    """
    shorter = add_state(states, head, states[above, LENGTH] + 1)
    for column in (LINK, COUNT, LATEST):
        states[shorter, column] = states[state, column]
    edge = states[state, EDGES]
    while edge != -1:
        add_edge(states, edges, table, head, shorter, edges[edge, TOKEN], edges[edge, TO])
        edge = edges[edge, NEXT]
    while above != -1:
        edge = table[slot_of(table, edges, above, token)] - 1
        if edges[edge, TO] != state:
            break
        edges[edge, TO] = shorter
        above = states[above, LINK]
    states[state, LINK] = shorter
    return shorter


@compiled
def append(states: Array, edges: Array, table: Array, head: Array, token: int) -> None:
    """The automaton's text grows by a token."""
    last = head[WHOLE]
    whole = add_state(states, head, states[last, LENGTH] + 1)
    above = last
    while above != -1 and step(table, edges, above, token) == -1:
        add_edge(states, edges, table, head, above, token, whole)
        above = states[above, LINK]
    if above == -1:
        states[whole, LINK] = 0
    else:
        before = step(table, edges, above, token)
        if states[before, LENGTH] != states[above, LENGTH] + 1:
            before = split(states, edges, table, head, before, above, token)
        states[whole, LINK] = before
    head[WHOLE] = whole
    head[TOKENS] += 1
    count(states, whole, head[TOKENS])


@compiled
def count(states: Array, whole: int, place: int) -> None:
    """All suffixes of the text occurred once more."""
    state = whole
    for _ in range(COUNTED):
        if state <= 0:
            break
        states[state, COUNT] += 1
        states[state, LATEST] = place
        state = states[state, LINK]


@compiled
def extend(states: Array, edges: Array, table: Array, head: Array, tokens: Array) -> None:
    """The text grows by tokens; the arrays have room for them."""
    for token in tokens:
        append(states, edges, table, head, token)


@compiled
def rehash(edges: Array, table: Array, head: Array) -> None:
    """Fill a table, which is empty, with the edges that there are."""
    for edge in range(head[EDGE_COUNT]):
        table[slot_of(table, edges, edges[edge, FROM], edges[edge, TOKEN])] = edge + 1


@compiled
def holder(states: Array, state: int, length: int) -> int:
    """The state of a string that was in this state: as the text grows, shorter strings are split from longer ones."""
    while state > 0 and length <= states[states[state, LINK], LENGTH]:
        state = states[state, LINK]
    return state


@compiled
def walk(states: Array, edges: Array, table: Array, state: int, length: int, tokens: Array) -> tuple[int, int]:
    """The longest suffix of a matched string and more tokens that the text has, too: its state and length."""
    state = holder(states, state, length)
    for token in tokens:
        following = step(table, edges, state, token)
        while following == -1 and state > 0:
            state = states[state, LINK]
            length = states[state, LENGTH]
            following = step(table, edges, state, token)
        if following != -1:
            state = following
            length += 1
    return state, length


@compiled
def is_among(tokens: Array, token: int) -> bool:
    """Whether some tokens have this one; without an array in between."""
    found = False
    for each in tokens:
        found = found or each == token
    return found


@compiled
def commonest(states: Array, edges: Array, state: int, skipped: Array) -> tuple[int, float]:
    """The edge by which a state was left most often, of equals the latest, and its share; (-1, 0): there is none.

    Args:
        skipped: tokens that are passed over. They count for the share.
    """
    best, best_count, best_latest = -1, 0, 0
    total, kinds = 0, 0
    edge = states[state, EDGES]
    while edge != -1 and kinds < COMPARED:
        to, token = edges[edge, TO], edges[edge, TOKEN]
        occurred, latest = states[to, COUNT], states[to, LATEST]
        total += occurred
        kinds += 1
        better = occurred > best_count or (occurred == best_count and latest > best_latest)
        if better and token != NO_TOKEN and not is_among(skipped, token):
            best, best_count, best_latest = edge, occurred, latest
        edge = edges[edge, NEXT]
    return best, best_count / (total + ESCAPE * kinds) if best != -1 else 0.0


@compiled
def goes_on(states: Array, edges: Array, state: int, length: int) -> tuple[int, int]:
    """The longest suffix of a string that some token has followed: state and length; (0, 0): none."""
    state = holder(states, state, length)
    while state > 0:
        edge = states[state, EDGES]
        if edge != -1 and (edges[edge, TOKEN] != NO_TOKEN or edges[edge, NEXT] != -1):
            return state, length
        state = states[state, LINK]
        length = states[state, LENGTH]
    return 0, 0


@compiled
def follow(states: Array, edges: Array, state: int, found: Array, shares: Shares) -> int:
    """Go on from a state by what followed most often; returns how many tokens there are.

    Where the whole text was followed to its end it goes on as its longest suffix did that occurred before, so what
    repeats itself goes on for ever.

    Args:
        found: takes the tokens.
        shares: takes each token's share of what followed there.
    """
    nothing, length = found[:0], 0
    while length < found.size and state > 0:
        edge, share = commonest(states, edges, state, nothing)
        if edge != -1:
            found[length], shares[length] = edges[edge, TOKEN], share
            length += 1
            state = edges[edge, TO]
        elif states[state, EDGES] == -1:
            state = states[state, LINK]
        else:
            break
    return length
