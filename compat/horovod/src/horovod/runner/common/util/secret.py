"""Keys by which processes of a job can prove to each other what they send."""

import hmac
import os

__all__ = ["DIGEST_LENGTH", "HOROVOD_SECRET_KEY", "SECRET_LENGTH", "check_digest", "compute_digest", "make_secret_key"]
SECRET_LENGTH = DIGEST_LENGTH = 32  # bytes
HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"


def make_secret_key() -> bytes:
    """A new key."""
    return os.urandom(SECRET_LENGTH)


def compute_digest(key: bytes, message: bytes) -> bytes:
    """The HMAC of a message, with SHA-256."""
    return hmac.digest(key, message, "sha256")


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Whether the digest is that of the message."""
    return hmac.compare_digest(compute_digest(key, message), digest)
