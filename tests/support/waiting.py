"""A stream whose text tests wait for."""

from __future__ import annotations

import io

from time_limits import wait_until


class Lines(io.StringIO):
    """A stream, for `redirect_stderr`, whose text can be waited for while other threads write."""

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.getvalue())
