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
MAX_COUNTED_SUFFIXES = 64
"""Most suffixes, the longest first, that are counted with each token. Usual texts have fewer. A text that repeats
itself without end has one more for each token, and its shorter suffixes go on as the longer ones do."""
MAX_CONTINUATIONS = 64
"""Most continuations of one place that are compared."""
ESCAPE = 0.5
"""Count given to new continuations for each distinct one so far (prediction by partial matching, method D).
It takes 0.3 % off the time of replayed texts beside plain frequencies (docs/decisions)."""
NO_TOKEN = -1
"""Separates texts: it occurs in none, so no match goes on past it."""


@compiled
def slot_of(table: Array, edges: Array, state: int, token: int) -> int:
    """The table's slot for an edge, whether it is there or not."""
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
    entry = table[slot_of(table, edges, state, token)]
    return int(edges[entry - 1, TO]) if entry else -1


@compiled
def add_edge(states: Array, edges: Array, table: Array, head: Array, state: int, token: int, to: int) -> None:
    """Add the edge of a token to a state that had none for it."""
    edge = head[EDGE_COUNT]
    head[EDGE_COUNT] += 1
    edges[edge, TOKEN], edges[edge, TO], edges[edge, FROM] = token, to, state
    edges[edge, NEXT] = states[state, EDGES]
    states[state, EDGES] = edge
    table[slot_of(table, edges, state, token)] = edge + 1


@compiled
def add_state(states: Array, head: Array, length: int) -> int:
    """Add a state whose longest string has `length` tokens."""
    state = int(head[STATES])
    head[STATES] += 1
    states[state, LENGTH], states[state, LINK], states[state, EDGES] = length, -1, -1
    states[state, COUNT] = states[state, LATEST] = 0
    return state


@compiled
def split(states: Array, edges: Array, table: Array, head: Array, state: int, ancestor: int, token: int) -> int:
    """Split a state's shorter strings, which occurred again, from its longer ones; returns the shorter ones' state.

    `ancestor` with the token leads to the longest of the shorter ones.
    """
    shorter = add_state(states, head, states[ancestor, LENGTH] + 1)
    for column in (LINK, COUNT, LATEST):
        states[shorter, column] = states[state, column]
    edge = states[state, EDGES]
    while edge != -1:
        add_edge(states, edges, table, head, shorter, edges[edge, TOKEN], edges[edge, TO])
        edge = edges[edge, NEXT]
    while ancestor != -1:
        edge = table[slot_of(table, edges, ancestor, token)] - 1
        if edges[edge, TO] != state:
            break
        edges[edge, TO] = shorter
        ancestor = states[ancestor, LINK]
    states[state, LINK] = shorter
    return shorter


@compiled
def append(states: Array, edges: Array, table: Array, head: Array, token: int) -> None:
    """Append a token to the automaton's text."""
    last = head[WHOLE]
    whole = add_state(states, head, states[last, LENGTH] + 1)
    ancestor = last
    while ancestor != -1 and step(table, edges, ancestor, token) == -1:
        add_edge(states, edges, table, head, ancestor, token, whole)
        ancestor = states[ancestor, LINK]
    if ancestor == -1:
        states[whole, LINK] = 0
    else:
        target = step(table, edges, ancestor, token)
        if states[target, LENGTH] != states[ancestor, LENGTH] + 1:
            target = split(states, edges, table, head, target, ancestor, token)
        states[whole, LINK] = target
    head[WHOLE] = whole
    head[TOKENS] += 1
    count(states, whole, head[TOKENS])


@compiled
def count(states: Array, whole: int, place: int) -> None:
    """Count one occurrence more of all suffixes of the text."""
    state = whole
    for _ in range(MAX_COUNTED_SUFFIXES):
        if state <= 0:
            break
        states[state, COUNT] += 1
        states[state, LATEST] = place
        state = states[state, LINK]


@compiled
def extend(states: Array, edges: Array, table: Array, head: Array, tokens: Array) -> None:
    """Append tokens to the text; the arrays have room for them."""
    for token in tokens:
        append(states, edges, table, head, token)


@compiled
def rehash(edges: Array, table: Array, head: Array) -> None:
    """Enter all edges into an empty table."""
    for edge in range(head[EDGE_COUNT]):
        table[slot_of(table, edges, edges[edge, FROM], edges[edge, TOKEN])] = edge + 1


@compiled
def holder(states: Array, state: int, length: int) -> int:
    """The state that a string of this state belongs to now: growth splits shorter strings from longer ones."""
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
    """Whether a token is among some; makes no array."""
    present = False
    for each in tokens:
        present = present or each == token
    return present


@compiled
def commonest(states: Array, edges: Array, state: int, exclude: Array) -> tuple[int, float]:
    """The edge by which a state was left most often, of equals the latest, and its share; (-1, 0): there is none.

    Args:
        exclude: tokens that are passed over; they count for the share.
    """
    best, best_count, best_latest = -1, 0, 0
    total, kinds = 0, 0
    edge = states[state, EDGES]
    while edge != -1 and kinds < MAX_CONTINUATIONS:
        to, token = edges[edge, TO], edges[edge, TOKEN]
        occurrences, latest = states[to, COUNT], states[to, LATEST]
        total += occurrences
        kinds += 1
        better = occurrences > best_count or (occurrences == best_count and latest > best_latest)
        if better and token != NO_TOKEN and not is_among(exclude, token):
            best, best_count, best_latest = edge, occurrences, latest
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
def follow(states: Array, edges: Array, state: int, following: Array, shares: Shares) -> int:
    """Follow the commonest continuations from a state; returns the number of tokens.

    At the text's end it goes on from the longest suffix that occurred before, so repetition goes on for ever.

    Args:
        following: receives the tokens.
        shares: receives each token's share of the continuations at its place.
    """
    nothing, length = following[:0], 0
    while length < following.size and state > 0:
        edge, share = commonest(states, edges, state, nothing)
        if edge != -1:
            following[length], shares[length] = edges[edge, TOKEN], share
            length += 1
            state = edges[edge, TO]
        elif states[state, EDGES] == -1:
            state = states[state, LINK]
        else:
            break
    return length
