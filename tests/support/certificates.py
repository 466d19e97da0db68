"""A certificate authority of a test's own, and servers' certificates that it signs."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

OPENSSL = shutil.which("openssl")


def make_authority(folder: Path) -> Path:
    """The PEM file that clients must trust."""
    folder.mkdir()
    _openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=Test CA",
             "-keyout", folder / "ca.key", "-out", folder / "ca.pem")  # fmt: skip
    return folder / "ca.pem"


def make_server_context(authority: Path, *, host: str = "IP:127.0.0.1") -> ssl.SSLContext:
    """`host`: what the certificate is for, as openssl writes it."""
    folder = authority.parent
    key, request, certificate = (folder / f"server.{end}" for end in ("key", "csr", "pem"))
    extensions = folder / "extensions"
    extensions.write_text(f"subjectAltName={host}\n")
    _openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=server",
             "-keyout", key, "-out", request)  # fmt: skip
    _openssl("x509", "-req", "-in", request, "-CA", authority, "-CAkey", folder / "ca.key",
             "-CAcreateserial", "-days", "2", "-extfile", extensions,
             "-out", certificate)  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context


def _openssl(*arguments: str | Path) -> None:
    assert OPENSSL is not None
    subprocess.run([OPENSSL, *arguments], check=True, capture_output=True)
