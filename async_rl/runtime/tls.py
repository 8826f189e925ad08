"""TLS of a listening socket: a certificate from files, and handshakes that count as connections."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Final

from async_rl.errors import ConfigError
from async_rl.runtime.listeners import LimitedProtocol, RepeatFilter
from async_rl.runtime.supervision import Nursery

log = logging.getLogger(__name__)
log.addFilter(RepeatFilter())

HANDSHAKE_S: Final = 10.0
"""The longest that a handshake may take."""


def load_certificate(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the server side of TLS (1.2 or later) with a certificate.

    Args:
        certificate: PEM file with the certificate and, after it, those that lead to a known authority.
        key: PEM file of its private key, not encrypted.

    Raises:
        ConfigError: A file cannot be read, or is not what it should be.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # Debian's Python leaves it to the system's OpenSSL
    for path in (certificate, key):
        try:
            path.read_bytes()
        except OSError as error:
            raise ConfigError(f"TLS: cannot read {path}: {error.strerror}") from error
    try:
        # Without a password function, OpenSSL would ask on the terminal for that of an encrypted key.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"TLS: {certificate} and {key} are not a certificate and its key ({error}): expected two PEM "
            "files, the key not encrypted"
        ) from error
    return context


class Handshakes(Nursery):
    """Does the handshakes of a listener's connections, as tasks of its own.

    asyncio's own TLS servers know a connection only after its handshake, so strangers could hold any number
    of descriptors.
    """

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__()
        self._context = context

    def start(self, transport: asyncio.Transport, protocol: LimitedProtocol) -> None:
        """Do the handshake of a new connection, and then begin its protocol."""
        self.start_task("TLS handshake", self._do(transport, protocol))

    async def _do(self, transport: asyncio.Transport, protocol: LimitedProtocol) -> None:
        try:
            secured = await asyncio.get_running_loop().start_tls(
                transport, protocol, self._context, server_side=True, ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError:  # a client without TLS, one that does not trust us, or one that is too slow
            secured = None
        except Exception as error:
            log.warning("a TLS handshake failed: %s: %s", type(error).__name__, error)
            secured = None
        if secured is None:
            transport.abort()
            protocol.connection_lost(None)
        else:
            protocol.begin(secured)
