"""Every surface, and its share of the 100,000 cases."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from tests.fuzz.cases import FuzzSurface
from tests.fuzz.codec_surface import open_codec
from tests.fuzz.events_surface import open_draft_events, open_target_events
from tests.fuzz.files_surface import open_files
from tests.fuzz.generate_surface import open_generate
from tests.fuzz.http_surface import open_http
from tests.fuzz.link_scripts import DRAFT_LINK, TARGET_LINK
from tests.fuzz.model_folders import open_folders
from tests.fuzz.sessions_surface import open_sessions
from tests.services.harness import draft_service, target_service

SHARES: Mapping[FuzzSurface, int] = {
    FuzzSurface("codec", open_codec, probe_every=5_000): 69_000,
    FuzzSurface("target", partial(open_sessions, target_service, TARGET_LINK), probe_every=10): 5_500,
    FuzzSurface("draft", partial(open_sessions, draft_service, DRAFT_LINK), probe_every=10): 5_500,
    FuzzSurface("draft-events", open_draft_events, probe_every=25): 500,
    FuzzSurface("target-events", open_target_events, probe_every=25): 500,
    FuzzSurface("generate", open_generate, probe_every=25): 5_000,
    FuzzSurface("http", open_http, probe_every=25): 7_000,
    FuzzSurface("files", open_files, probe_every=500): 6_000,
    FuzzSurface("folders", open_folders, probe_every=250): 1_000,
}
"""By what a case costs: the codec takes a tenth of a millisecond, a whole generation 20 ms, a model's folder 100."""
SURFACES: Mapping[str, FuzzSurface] = {surface.name: surface for surface in SHARES}
CASES: Mapping[str, int] = {surface.name: share for surface, share in SHARES.items()}
