"""TLS for listeners: contexts from files, and the name in a client's certificate."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from nearcast.config import Listener
from nearcast.errors import ConfigError


def server_context(listener: Listener) -> ssl.SSLContext:
    """The TLS settings of a ``tls`` or ``wss`` listener; :class:`ConfigError` says which file cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    certificate, key = listener.certificate_file, listener.key_file
    if certificate is None:
        raise ConfigError(f"the listener {listener.name} needs a certificate_file", key="listeners")

    def no_passphrase() -> str:
        # Otherwise OpenSSL would ask on the terminal, in the middle of a reload.
        raise ConfigError("the private key has a passphrase; give one without", path=key, key="listeners.key_file")

    try:
        context.load_cert_chain(certificate, key, password=no_passphrase)
    except ssl.SSLError as error:
        message = f"the certificate and its key {key} cannot be used: {error.reason or error}"
        raise ConfigError(message, path=certificate, key="listeners.certificate_file") from error
    except OSError as error:
        message = f"cannot read the certificate or its key {key}: {error.strerror}"
        raise ConfigError(message, path=certificate, key="listeners.certificate_file") from error
    if listener.client_certificates != "none" and listener.ca_file is not None:
        required = listener.client_certificates == "required"
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
        try:
            context.load_verify_locations(listener.ca_file)
        except (ssl.SSLError, OSError) as error:
            message = f"the certificate authorities cannot be read: {error.strerror or error}"
            raise ConfigError(message, path=listener.ca_file, key="listeners.ca_file") from error
    return context


def common_name(certificate: Mapping[str, object] | None) -> str | None:
    """The subject's common name of a verified certificate, as :meth:`ssl.SSLSocket.getpeercert` gives it."""
    subject = certificate.get("subject", ()) if certificate else ()
    if isinstance(subject, tuple):
        for relative_name in subject:
            for key, value in relative_name:
                if key == "commonName" and value:
                    return str(value)
    return None
