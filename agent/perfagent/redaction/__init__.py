"""Removes secrets from whatever leaves the process: arguments, configuration, log lines and tracebacks.

Two nets: by name (names.py: what is called password, token, api_key ... loses its value) and by value (values.py: what
looks like a key of a known service, a JWT, a private key). text.py lays both over text and lists of words, structure.py
over nested data, which it makes encodable as well. All that an event carries goes through `redacted`, in one place
(delivery/send_loop.py), on the sender's thread.
"""

from __future__ import annotations

from perfagent.redaction.names import HIDDEN, secret_key
from perfagent.redaction.structure import Versions, redacted
from perfagent.redaction.text import redacted_arguments, redacted_text

__all__ = ["HIDDEN", "Versions", "redacted", "redacted_arguments", "redacted_text", "secret_key"]
