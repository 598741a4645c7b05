"""HTTPS whose certificate can be renewed: each connection has the files of its moment."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from typing import Any

from paceline.rpc.tls import TlsFiles, TlsMaterial

logger = logging.getLogger(__name__)


class RenewedContext(ssl.SSLContext):
    """Stands for the context of the files as they are when a connection begins.

    A context of its own for each set of files: a session that another authority let in is not resumed.
    """

    _files: TlsFiles
    _make: Callable[[], ssl.SSLContext]
    _known: TlsMaterial
    _current: ssl.SSLContext

    @classmethod
    def of(cls, files: TlsFiles, make: Callable[[], ssl.SSLContext]) -> RenewedContext:
        """Over files that are right now.

        Args:
            files: which have been checked.
            make: the context of the files as they are when it is called.
        """
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context._files, context._make = files, make
        context._known, context._current = files.read(), make()
        return context

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        """Called once for each connection."""
        self._renew()
        return self._current.wrap_bio(*args, **options)

    def _renew(self) -> None:
        """Files that are replaced while they are read are read again at the next connection."""
        material = self._files.read()
        if material is self._known:
            return
        try:
            self._current = self._make()
        except OSError as error:
            logger.warning("TLS files have changed again, the last ones stay: error=%s", error)
            return
        self._known = material
