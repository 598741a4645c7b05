"""Every surface, and its share of the 100,000 cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.fuzz.cases import FuzzSurface
from tests.fuzz.codec_surface import CodecSurface
from tests.fuzz.events_surface import EVENTS
from tests.fuzz.files_surface import FilesSurface
from tests.fuzz.grpc_surfaces import STREAMS, GenerateSurface
from tests.fuzz.guided_surface import GuidedSurface
from tests.fuzz.http_surface import HttpSurface
from tests.fuzz.model_folders import FoldersSurface
from tests.fuzz.sessions_surface import SESSIONS

SURFACES: Mapping[str, Callable[[], FuzzSurface]] = {
    "codec": CodecSurface,
    "guided": GuidedSurface,
    **SESSIONS,
    **STREAMS,
    **EVENTS,
    "generate": GenerateSurface,
    "http": HttpSurface,
    "files": FilesSurface,
    "folders": FoldersSurface,
}
CASES: Mapping[str, int] = {
    "codec": 44_000,
    "guided": 25_000,
    "target": 4_000,
    "draft": 4_000,
    "target-stream": 1_500,
    "draft-stream": 1_500,
    "draft-events": 500,
    "target-events": 500,
    "generate": 5_000,
    "http": 7_000,
    "files": 6_000,
    "folders": 1_000,
}
"""By what a case costs: the codec takes a tenth of a millisecond, a whole generation 20 ms, a model's folder 100."""
