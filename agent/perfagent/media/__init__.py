"""Images, audio, tables and histograms that a script logs beside numbers.

Made on the training thread, where nothing but a copy is taken; encoded and sent on the sender's thread (outbox.py).
"""

from __future__ import annotations

from perfagent.media.values import Audio, Histogram, Image, Media, Table

__all__ = ["Audio", "Histogram", "Image", "Media", "Table"]
