"""Certificates of https:// servers: which are trusted, and why one is not.

Trusted are certifi's authorities, or those of the file or folder that `SSL_CERT_FILE` or
`SSL_CERT_DIR` names, as httpx does. There is no way to switch the verification off.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterable

import httpx

from courtside.errors import UserError

VARIABLES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
"""In the order in which httpx looks at them."""


def make_tls_context(urls: Iterable[str]) -> ssl.SSLContext | bool:
    """For httpx's `verify`. Certificates are read, which takes a while, only where there are any to
    check."""
    if not any(url.startswith("https:") for url in urls):
        return False
    try:
        return httpx.create_ssl_context()
    except (OSError, ssl.SSLError) as error:
        name = next((name for name in VARIABLES if name in os.environ), VARIABLES[0])
        raise UserError(
            f"{name} = {os.environ.get(name)!r}: no certificates can be read from it ({error}). "
            "Give a PEM file with the authorities to trust, or unset it"
        ) from None


def explain_tls_failure(error: BaseException) -> str | None:
    """Why a connection cannot be trusted, and what to do, where another try would not help; None:
    it failed for another reason."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"the certificate of the server is not trusted ({cause.verify_message}). If an "
            "authority of your own signed it, set SSL_CERT_FILE to a PEM file with that "
            "authority's certificate; the certificate must name the host as the address does"
        )
    if isinstance(cause, ssl.SSLError) and cause.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
        return "the server does not speak TLS on this port. Use http:// or the port with TLS"
    return None
