"""The page at `/`: the static files of this package, each with the headers that keep it to itself."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import HTTPException

FOLDER = Path(__file__).parent
START_FILE = "index.html"
METHODS = ["GET", "HEAD"]
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Nothing from elsewhere, nothing inline, nothing framed; with trusted types no text can become markup."""
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""`no-cache`: the browser asks by the file's tag each time, so that a page never mixes two versions."""


@dataclass(frozen=True)
class Asset:
    """One file of the page as it is sent."""

    content: bytes
    content_type: str

    @cached_property
    def tag(self) -> str:
        """The ETag of this content."""
        return f'"{hashlib.sha256(self.content).hexdigest()[:32]}"'

    def answer(self, browser_tags: str | None) -> Response:
        """Answer with the file, or with 304 if the browser has it by the tags of If-None-Match."""
        headers = {**HEADERS, "ETag": self.tag}
        if browser_tags is not None and self.tag in browser_tags:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.content_type, headers=headers)


def assets() -> dict[str, Asset]:
    """Read the page's files, by name."""
    return {
        path.name: Asset(path.read_bytes(), CONTENT_TYPES[path.suffix])
        for path in FOLDER.iterdir()
        if path.suffix in CONTENT_TYPES
    }


def add_page(app: FastAPI) -> None:
    """Serve the page at `/` and its other files below `/page/`."""
    files = assets()
    router = APIRouter(include_in_schema=False)

    @router.api_route("/", methods=METHODS)
    async def start(request: Request) -> Response:
        return files[START_FILE].answer(request.headers.get("if-none-match"))

    @router.api_route("/page/{name}", methods=METHODS)
    async def asset(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404, f"page: {name!r} is none of its files")
        return files[name].answer(request.headers.get("if-none-match"))

    app.include_router(router)
