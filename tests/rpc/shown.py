"""What a TLS server shows to whoever connects now."""

from __future__ import annotations

import socket
import ssl

from cryptography import x509

from paceline.runtime.config import PeerSettings


def shown_certificate(peer: PeerSettings) -> x509.Certificate:
    """The certificate of a new connection, which is as gRPC's would be."""
    assert peer.tls_certificate is not None
    context = ssl.create_default_context(cafile=peer.tls_ca)
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(peer.tls_certificate, peer.tls_key)
    host, _, port = peer.address.rpartition(":")
    with (
        socket.create_connection((host, int(port))) as plain,
        context.wrap_socket(plain, server_hostname=peer.server_name) as wrapped,
    ):
        shown = wrapped.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown)
